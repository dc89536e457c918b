from __future__ import annotations

import pytest
from onnx import ModelProto, helper, parser

from onnxq.errors import ModelError
from onnxq.ir import read_model
from onnxq.onnx_api import inline_functions

HEAD = """<ir_version: 9, opset_import: ["" : 17, "mine" : 1]> main (float[2] x) => (float[2] y) { y = mine.f0(x) }"""


def model_of(*bodies: str) -> ModelProto:
    """Return a model that calls f0, where body number n is that of the function fn."""
    functions = (
        f'<domain: "mine", opset_import: ["" : 17, "mine" : 1]> f{index} (a) => (b) {{ {body} }}'
        for index, body in enumerate(bodies)
    )
    return parser.parse_model(HEAD + " ".join(functions))


def inlined_ops(model: ModelProto) -> list[str]:
    return [node.op for node in inline_functions(read_model(model)).nodes]


def test_functions_are_inlined_through_one_another() -> None:
    assert inlined_ops(model_of("c = mine.f1(a) b = mine.f1(c)", "b = Relu(a)")) == ["Relu", "Relu"]


@pytest.mark.parametrize(
    "bodies",
    [("b = mine.f0(a)",), ("b = mine.f1(a)", "b = mine.f2(a)", "b = mine.f1(a)")],
    ids=["itself", "through another"],
)
def test_a_function_that_calls_itself_is_refused(bodies: tuple[str, ...]) -> None:
    with pytest.raises(ModelError, match=r"^function 'f[012]' of the model calls itself; the model is damaged$"):
        inlined_ops(model_of(*bodies))


def test_a_call_from_a_body_of_control_flow_counts() -> None:
    branch = "() => (float[2] c) { c = mine.f0(a) }"
    looped = f"t = Constant<value = bool {{1}}>() b = If (t) <then_branch = g {branch}, else_branch = h {branch}>"
    with pytest.raises(ModelError, match="calls itself"):
        inlined_ops(model_of(looped))


def test_functions_that_multiply_one_another_are_refused_before_anything_is_inlined() -> None:
    ten = " ".join(f"c{i + 1} = mine.f{{}}(c{i})" for i in range(10))
    bodies = [f"c0 = Identity(a) {ten.format(*[level + 1] * 10)} b = Identity(c10)" for level in range(12)]
    with pytest.raises(ModelError, match=r"has 1\.\d+e\+12 nodes once its functions are inlined, expected at most"):
        inlined_ops(model_of(*bodies, "b = Relu(a)"))


def test_a_long_chain_of_functions_is_inlined() -> None:
    length = 200
    assert inlined_ops(model_of(*(f"b = mine.f{i + 1}(a)" for i in range(length)), "b = Relu(a)")) == ["Relu"]


def test_two_functions_of_one_name_are_refused() -> None:
    model = model_of("b = Relu(a)")
    model.functions.append(
        helper.make_function("mine", "f0", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], model.opset_import)
    )
    with pytest.raises(ModelError, match="two functions named 'f0'"):
        inlined_ops(model)
