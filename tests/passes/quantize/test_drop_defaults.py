"""DropDefaults leaves out what operators do anyway, and nothing else."""

from __future__ import annotations

import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, outputs, sample, values

from onnxq.ir import to_model
from onnxq.passes import DropDefaults
from onnxq.rewrite import Changes


@pytest.mark.parametrize(
    ("node", "left"),
    [
        ("Conv<dilations=[1,1], group=1, kernel_shape=[3,3], pads=[0,0,0,0], strides=[1,1]>(x, w)", {"kernel_shape"}),
        ("Conv<dilations=[1,2], group=1, pads=[0,0,1,1], strides=[2,1]>(x, w)", {"dilations", "pads", "strides"}),
        ("Conv<auto_pad='NOTSET'>(x, w)".replace("'", '"'), set()),
        ("Conv<auto_pad='SAME_UPPER'>(x, w)".replace("'", '"'), {"auto_pad"}),
        ("MaxPool<ceil_mode=0, kernel_shape=[2,2], pads=[0,0,0,0], storage_order=0>(x)", {"kernel_shape"}),
        ("HardSigmoid<alpha=0.2, beta=0.5>(x)", set()),
        ("HardSigmoid<alpha=0.16, beta=0.5>(x)", {"alpha"}),
        ("Softmax<axis=-1>(x)", set()),
        ("Softmax<axis=1>(x)", {"axis"}),
        ("Transpose<perm=[0,1,2,3]>(x)", {"perm"}),
    ],
)
def test_attributes(node: str, left: set[str]) -> None:
    made = model(f"g (float[1,3,6,6] x) => (float[a,b,c,d] y) {{ y = {node} }}", w=values(4, 3, 3, 3))
    graph = named_graph(made)
    apply_once(DropDefaults(), graph)
    (found,) = nodes(graph)
    assert set(found.attrs) == left
    assert difference(outputs(to_model(graph), sample(made)), outputs(made, sample(made))) == 0


def test_what_the_opset_of_the_model_says_counts() -> None:
    for opset, left in ((11, {"axis"}), (13, set())):
        made = model("g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis=-1>(x) }", opset=opset)
        graph = named_graph(made)
        DropDefaults().apply(graph)
        (found,) = nodes(graph)
        assert set(found.attrs) == left


def test_operators_of_other_domains_stay() -> None:
    made = model("g (float[2,3] x) => (float[2,3] y) { y = com.microsoft.QuickGelu<alpha=1.0>(x) }")
    assert DropDefaults().apply(named_graph(made)) == Changes()


def test_operators_that_the_opset_does_not_have_yet_stay() -> None:
    text = "g (float[2,3] x) => (float[2,3] y) { y = LayerNormalization<axis=-1, epsilon=0.00001>(x, s) }"
    made = model(text, opset=14, s=values(3))
    assert DropDefaults().apply(named_graph(made)) == Changes()
