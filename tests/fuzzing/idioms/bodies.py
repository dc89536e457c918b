"""Recurrent layers, bodies and functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from fuzzing.builder import F32, F64, I64, Builder
from fuzzing.idioms.writing import idiom, lengths, operand

# Recurrent layers


def _cell(b: Builder, kind: str, **attributes: Any) -> Any:
    gates, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], int(b.pick([2, 3]))
    length, batch, size = int(b.pick([1, 3])), int(b.pick([1, 2])), int(b.pick([2, 4]))
    x = b.input(length, batch, size)
    directions = int(b.pick([1, 1, 2]))
    inputs: list[str | None] = [
        x,
        b.constant(b.normal(directions, gates * hidden, size)),
        b.constant(b.normal(directions, gates * hidden, hidden)),
    ]
    inputs.append(b.constant(b.normal(directions, 2 * gates * hidden)) if b.chance(0.5) else None)
    inputs.append(None)
    states = []
    for _ in range(2 if kind == "LSTM" else 1):
        form = b.word("none zeros zeros filled computed")
        shape = (directions, batch, hidden)
        if form == "computed" and b.opset >= 9:
            filling = numpy_helper.from_array(np.array([b.pick([0.0, 0.0, 1.0, -0.0])]).astype(b.dtype))
            target = b.op("Concat", b.numbers(directions), *lengths(b, x, [1]), b.numbers(hidden), axis=0)
            states.append(b.op("ConstantOfShape", target, value=filling))
        else:
            states.append(
                None
                if form == "none"
                else b.constant(np.zeros(shape, b.dtype) if form == "zeros" else b.normal(*shape))
            )
    inputs += states
    while inputs[-1] is None:
        inputs.pop()
    direction = "bidirectional" if directions == 2 else b.pick([None, "forward", "reverse"])
    outputs = b.ops(
        kind, *inputs, outputs=3 if kind == "LSTM" else 2, hidden_size=hidden, direction=direction, **attributes
    )
    return b.squeeze(outputs[0], [1]) if directions == 1 else b.op("Transpose", outputs[0], perm=[0, 2, 1, 3])


@idiom("DropInitialStates", dtypes=(F32,))
def recurrent(b: Builder) -> Any:
    kind = b.pick(["LSTM", "GRU", "RNN"])
    return _cell(b, kind, linear_before_reset=b.pick([None, 0, 1]) if kind == "GRU" else None)


# Bodies


def _few(b: Builder, x: str) -> str:
    """Add a few operators of which most rules are made."""
    for _ in range(int(b.pick([1, 2, 3]))):
        form = b.word("unary binary clamp idiom capture Identity")
        if form == "unary":
            x = b.op(b.word("Relu Sigmoid Neg Tanh"), x)
        elif form == "binary":
            x = b.op(b.word("Add Mul Sub Div"), x, b.constant(operand(b, x) if b.chance(0.5) else b.normal()))
        elif form == "clamp":
            x = b.clip(x, b.pick([None, 0.0]), 6.0)
        elif form == "capture":
            alike = [
                name for name in b.sources() if b.shape(name) in (b.shape(x), ()) and b.value(name).dtype == b.dtype
            ]
            x = b.op(b.pick(["Add", "Mul"]), x, b.pick([x, *alike]))
        elif form == "Identity":
            x = b.op("Identity", x)
        else:
            x = b.op("Mul", x, b.op("Sigmoid", x))
    return x


def _constant_in_body(b: Builder) -> str:
    """Add what is computed in a body from its own constants and those around it."""
    around = b.pick([name for name in b.sources() if b.value(name).dtype == b.dtype] or [b.find()])
    own = b.constant(b.normal(*b.shape(around)))
    form = b.word("Clip Add Mul Max")
    if form == "Clip" and b.opset >= 11 and b.rank(around) == 0:
        return b.op("Clip", b.constant(b.normal(2)), around)
    return b.op("Mul" if form == "Clip" else form, own, around)


@idiom("InlineIfs", "FoldConstants", "LiftConstants", "NameTensors", "FixInitializers")
def branches(b: Builder) -> Any:
    x = b.find()
    if b.chance(0.5):
        total = b.op("Add", b.constant(b.normal()), b.constant(b.normal()))
        if b.chance(0.7):
            b.returned.append(total)
        x = total if b.chance(0.5) else x
    truth = (
        b.constant(np.asarray(b.chance(0.5)))
        if b.chance(0.5)
        else b.input(dtype=np.bool_, values=np.asarray(b.chance(0.5)))
    )
    bodies = []
    for _ in range(2):
        body = b.body()
        made = _constant_in_body(body) if b.chance(0.3) else body.op("Identity", x) if b.chance(0.2) else _few(body, x)
        bodies.append((body, made))
    then, other = (body.graph([made], declared=b.chance(0.5)) for body, made in bodies)
    return b.op("If", truth, then_branch=then, else_branch=other)


@idiom("LiftInvariants", "FoldConstants", dtypes=(F32, F32, F64))
def loops(b: Builder) -> Any:
    starts = [b.find((1, 2)) for _ in range(int(b.pick([1, 2, 3])))]
    body = b.body()
    step, going = body.formal(np.asarray(0, I64), "i"), body.formal(np.asarray(True), "go")
    states = [body.formal(b.value(start)) for start in starts]
    following, scanned = [], []
    for state in states:
        form = b.word("same same identity changed")
        if form == "changed":
            made = _few_keeping(body, state, states)
        else:
            made = body.op("Identity", state) if form == "identity" or b.chance(0.7) else state
        following.append(made)
        if b.chance(0.3):
            scanned.append(state)
    if b.chance(0.3):
        scanned.append(body.op("Cast", step, to=TensorProto.FLOAT))
    if b.chance(0.3) and following:
        scanned.append(body.op("Neg", states[0]))
    # The same tensor twice among outputs is one that onnx refuses.
    outputs = [body.op("Identity", going)]
    for name in (*following, *scanned):
        outputs.append(body.op("Identity", name) if name in outputs else name)
    # The shape of what no iteration collects is a guess of onnxruntime's.
    count = int(b.pick([3, 2] if scanned else [3, 2, 0]))
    graph = body.graph(outputs, declared=b.chance(0.5))
    first = b.pick([None, b.constant(np.asarray(True))])
    made = b.ops(
        "Loop", b.constant(np.asarray(count, I64)), first, *starts, outputs=len(following) + len(scanned), body=graph
    )
    for name in made[: len(following)] if b.chance(0.5) else ():
        b.op("Neg", name)
    return made[-1]


def _few_keeping(b: Builder, x: str, states: list[str]) -> str:
    """Add a few operators that keep the shape."""
    others = [state for state in states if b.shape(state) == b.shape(x)]
    for _ in range(int(b.pick([1, 2]))):
        x = b.op("Add", x, b.pick(others)) if b.chance(0.5) else b.op(b.pick(["Relu", "Tanh", "Neg"]), x)
    return x


@idiom("LiftInvariants", "NameTensors", opsets=(9, 24), dtypes=(F32, F32, F64))
def scans(b: Builder) -> Any:
    sequence = b.input(3, 2)
    starts = [b.input(2) for _ in range(int(b.pick([1, 2])))]
    body = b.body()
    states = [body.formal(b.value(start)) for start in starts]
    row = body.formal(b.value(sequence)[0])
    following = [
        body.op("Identity", state) if b.chance(0.5) else _few_keeping(body, state, [*states, row]) for state in states
    ]
    made = body.op(b.pick(["Add", "Mul"]), row, b.pick(states))
    graph = body.graph([*following, made])
    outputs = b.ops("Scan", *starts, sequence, outputs=len(starts) + 1, body=graph, num_scan_inputs=1)
    return outputs[-1]


@idiom("InlineFunctions", opsets=(13, 24), dtypes=(F32, F32, F64), turns=2)
def functions(b: Builder) -> Any:
    """Add a call of a function, which may call another; attributes have defaults or not, and calls give them or not."""
    x = b.find()
    inner, default = _function(b, x), b.chance(0.5)
    if b.chance(0.5):
        return b.op(inner, x, domain="local", slope=b.pick([None, 0.3]))
    body = b.body()
    given = body.formal(b.value(x))
    made = body.op(inner, given, domain="local", slope=0.7)
    if b.chance(0.7):
        _refer(body.nodes[-1], "slope", "steepness")
    else:
        default = True
        if b.chance(0.5):
            # The inner default holds.
            del body.nodes[-1].attribute[:]
    result = body.op(b.pick(["Neg", "Abs"]), made)
    return b.op(
        _defined(b, body, given, result, "steepness", default),
        x,
        domain="local",
        steepness=b.pick([None, 0.4]) if default else 0.4,
    )


def _function(b: Builder, x: str) -> str:
    """Define a function of one input whose attribute has a default, and return its name."""
    body = b.body()
    given = body.formal(b.value(x))
    op, attribute = b.pick([("LeakyRelu", "alpha"), ("Elu", "alpha"), ("HardSigmoid", "beta")])
    made = body.op(op, body.op("Mul", given, body.op("Sigmoid", given)), **{attribute: 0.2})
    _refer(body.nodes[-1], attribute, "slope")
    return _defined(b, body, given, made, "slope", default=True)


def _refer(node: NodeProto, attribute: str, name: str) -> None:
    """Let an attribute of a node in a function be that of the call."""
    entry = next(entry for entry in node.attribute if entry.name == attribute)
    entry.ClearField("f")
    entry.ref_attr_name = name


def _defined(b: Builder, body: Builder, given: str, result: str, attribute: str, default: bool) -> str:
    name = b.fresh("Function")
    imports = [helper.make_opsetid("", b.opset), helper.make_opsetid("local", 1)]
    protos = [helper.make_attribute(attribute, 0.25)] if default else []
    named = [] if default else [attribute]
    b.functions.append(
        helper.make_function(
            "local", name, [given], [result], body.nodes, imports, attributes=named, attribute_protos=protos
        )
    )
    return name
