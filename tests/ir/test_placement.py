from __future__ import annotations

import numpy as np
from onnx import parser

from onnxq.ir import Graph, constant, place_constants, read_model, to_model
from onnxq.ir.serialize import attribute_constants, constants_read

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x, bool c) => (float[4] y)
<float[4] w = {1, 2, 3, 4}, float[4] v = {5, 6, 7, 8}, float[4] spare = {0, 0, 0, 0}> {
  h = Mul(x, w)
  y = If (c) <then_branch = t () => (p) { p = Add(h, v) }, else_branch = e () => (q) { q = Sub(h, v) }>
}"""


def graph() -> Graph:
    return read_model(parser.parse_model(MODEL))


def branches(graph: Graph) -> list[Graph]:
    return graph.nodes[1].subgraphs()


def declared(graph: Graph) -> dict[str, list[str]]:
    """Names by graph, which are those of the written model too."""
    found = {scope.name: [tensor.name for tensor in tensors] for scope, tensors in place_constants(graph).items()}
    written = to_model(graph).graph
    for proto in (written, *(attribute.g for attribute in written.node[1].attribute)):
        assert sorted(tensor.name for tensor in proto.initializer) == sorted(found[proto.name])
    return found


def test_constants_stay_where_they_were_declared_also_when_unused_from_the_start() -> None:
    assert declared(graph()) == {"g": ["w", "v", "spare"], "t": [], "e": []}


def test_a_new_constant_is_declared_where_all_its_users_see_it() -> None:
    main = graph()
    then, otherwise = branches(main)
    alone, shared = constant("alone", np.float32(1)), constant("shared", np.float32(2))
    then.nodes[0].inputs[1] = alone
    assert declared(main) == {"g": ["w", "v", "spare"], "t": ["alone"], "e": []}

    then.nodes[0].inputs[1] = otherwise.nodes[0].inputs[1] = shared
    assert declared(main) == {"g": ["w", "spare", "shared"], "t": [], "e": []}


def test_a_declared_constant_moves_outwards_when_the_graph_around_uses_it() -> None:
    main = graph()
    then, _ = branches(main)
    inner = constant("inner", np.ones(4, np.float32))
    then.initializers.append(inner)
    then.nodes[0].inputs[1] = main.nodes[0].inputs[1] = inner

    assert declared(main) == {"g": ["v", "spare", "inner"], "t": [], "e": []}


def test_a_constant_that_lost_its_last_use_is_not_declared() -> None:
    main = graph()
    main.nodes[0].inputs[1] = main.initializers[1]

    assert declared(main)["g"] == ["v", "spare"]


def test_what_a_graph_returns_is_read_and_what_attributes_hold_is_not() -> None:
    main = graph()
    held = constant("held", np.float32(1))
    main.nodes[0].attrs["value"] = held
    main.outputs.append(main.initializers[2])

    assert [tensor.name for tensor in constants_read(main)] == ["w", "spare"]
    assert list(attribute_constants(main)) == [held]
