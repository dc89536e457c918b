"""What constants alone decide is computed, bit for bit as onnxruntime does."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bits import Array, assert_same_bits, by_onnxruntime, dtype_named, random_codes
from onnx import TensorProto, helper

import onnxq.rewrite.constant_folding as constant_folding
from onnxq.errors import ModelError
from onnxq.ir import ArrayData, Node, TensorData, Variable, constant
from onnxq.ir.computed_data import DerivedTensor, derived
from onnxq.rewrite.constant_folding import Step, evaluate, evaluate_all, is_small
from onnxq.rewrite.views import VIEWS, view_of

# Payloads -------------------------------------------------------------------------------------------------------------

PAYLOADS_LARGE = np.arange(300 * 200, dtype=np.float16).reshape(300, 200)


def test_few_values_are_derived_at_once() -> None:
    found = derived(ArrayData(PAYLOADS_LARGE[:3]), np.transpose)
    assert isinstance(found, ArrayData)
    np.testing.assert_array_equal(found.load(), PAYLOADS_LARGE[:3].T)


def test_many_values_are_derived_when_they_are_asked_for() -> None:
    seen: list[int] = []

    def transpose(array: np.ndarray) -> np.ndarray:
        seen.append(array.strides[0])
        return array.T

    found = derived(ArrayData(PAYLOADS_LARGE), transpose)
    assert seen == [0], "one element told the shape"
    assert (found.shape, found.onnx_dtype, found.nbytes) == ((200, 300), TensorProto.FLOAT16, 120_000)
    assert found.load().flags.c_contiguous
    assert b"".join(found.chunks()) == found.to_proto("w").raw_data == PAYLOADS_LARGE.T.tobytes()


def test_types_are_changed_as_well() -> None:
    found = derived(ArrayData(PAYLOADS_LARGE), lambda array: array.astype(np.float32), np.dtype(np.float32))
    assert (found.shape, found.onnx_dtype) == (PAYLOADS_LARGE.shape, TensorProto.FLOAT)
    np.testing.assert_array_equal(found.load(), PAYLOADS_LARGE.astype(np.float32))


def test_what_cannot_be_derived_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="reshape"):
        derived(ArrayData(PAYLOADS_LARGE), lambda array: array.reshape(7, -1))


def test_a_chain_of_thousands_is_followed_without_recursion() -> None:
    found: TensorData = ArrayData(PAYLOADS_LARGE)
    for _ in range(5001):
        found = derived(found, np.transpose)
    assert isinstance(found, DerivedTensor)
    np.testing.assert_array_equal(found.load(), PAYLOADS_LARGE.T)


# Moves ----------------------------------------------------------------------------------------------------------------

CUBE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
FAR = 2**62


def numbers(*values: int) -> Array:
    return np.array(values, np.int64)


CASES: list[tuple[str, Array, dict[str, Any], list[Array]]] = [
    ("Identity", CUBE, {}, []),
    ("Transpose", CUBE, {}, []),
    ("Transpose", CUBE, {"perm": [1, 2, 0]}, []),
    ("Flatten", CUBE, {}, []),
    ("Flatten", CUBE, {"axis": 0}, []),
    ("Flatten", CUBE, {"axis": -1}, []),
    ("Flatten", CUBE, {"axis": 3}, []),
    ("Reshape", CUBE, {}, [numbers(0, -1)]),
    ("Reshape", CUBE, {}, [numbers(4, 0, 2)]),
    ("Reshape", CUBE[:, :0], {"allowzero": 1}, [numbers(0, 7)]),
    ("Squeeze", CUBE[:1, :, :1], {}, []),
    ("Squeeze", CUBE[:1, :, :1], {}, [numbers(-1)]),
    ("Unsqueeze", CUBE, {}, [numbers(0, -1)]),
    ("Unsqueeze", CUBE, {}, [numbers(3, 1)]),
    ("Slice", CUBE, {}, [numbers(1), numbers(FAR)]),
    ("Slice", CUBE, {}, [numbers(-FAR), numbers(-1), numbers(-1)]),
    ("Slice", CUBE, {}, [numbers(0, 1), numbers(1, 9), numbers(2, 0)]),
    ("Slice", CUBE, {}, [numbers(FAR), numbers(-FAR), numbers(2), numbers(-2)]),
    ("Slice", CUBE, {}, [numbers(-FAR), numbers(-FAR), numbers(2), numbers(-1)]),
    ("Slice", CUBE, {}, [numbers(2), numbers(0), numbers(1), numbers(-1)]),
    ("Slice", CUBE, {}, [numbers(3), numbers(1), numbers(2)]),
]


@pytest.mark.parametrize(("op", "array", "attributes", "parameters"), CASES)
def test_views_are_what_onnxruntime_computes(
    op: str, array: Array, attributes: dict[str, Any], parameters: list[Array]
) -> None:
    view = view_of(op, attributes, parameters)
    assert view is not None
    found = view(array)
    assert np.may_share_memory(found, array) or not found.size
    expected = by_onnxruntime(op, [np.ascontiguousarray(array), *parameters], attributes, np.float32)
    assert_same_bits(np.ascontiguousarray(found), expected)


def test_every_view_is_tried() -> None:
    assert {op for op, *_ in CASES} == VIEWS


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Reshape", {"shape": [4, 3]}),
        ("Squeeze", {"axes": [0]}),
        ("Unsqueeze", {"axes": [1]}),
        ("Slice", {"starts": [0], "ends": [1], "axes": [1]}),
    ],
)
def test_bounds_and_axes_of_old_operators_are_attributes(op: str, attributes: dict[str, Any]) -> None:
    array = CUBE[:1]
    view = view_of(op, attributes, [])
    assert view is not None
    expected = {"Reshape": (4, 3), "Squeeze": (3, 4), "Unsqueeze": (1, 1, 3, 4), "Slice": (1, 1, 4)}
    assert view(array).shape == expected[op]


@pytest.mark.parametrize(
    ("op", "attributes", "parameters"),
    [
        ("Transpose", {"perm": [0, 0, 1]}, []),
        ("Flatten", {"axis": 4}, []),
        ("Reshape", {}, [numbers(5, 5)]),
        ("Reshape", {}, []),
        ("Squeeze", {}, [numbers(0)]),
        ("Unsqueeze", {}, []),
        ("Slice", {}, [numbers(0)]),
        ("Slice", {}, [numbers(0), numbers(1), numbers(0), numbers(0)]),
        ("Slice", {}, [numbers(0), numbers(1), numbers(7)]),
        ("Slice", {}, [numbers(0), numbers(2**31 - 1), numbers(0), numbers(-1)]),
        ("Slice", {}, [numbers(2), numbers(2**63 - 1), numbers(0), numbers(-1)]),
    ],
)
def test_what_does_not_fit_is_refused(op: str, attributes: dict[str, Any], parameters: list[Array]) -> None:
    view = view_of(op, attributes, parameters)
    assert view is not None
    with pytest.raises((ValueError, TypeError, IndexError)):
        view(CUBE)


def test_what_looks_at_elements_is_no_view() -> None:
    assert view_of("Add", {}, []) is None


# Steps ----------------------------------------------------------------------------------------------------------------


def step(op: str, arrays: list[Array | None], outputs: int = 1, **attributes: Any) -> tuple[Step, list[Variable]]:
    made = [Variable(f"y{index}") for index in range(outputs)]
    inputs = tuple(None if array is None else ArrayData(array) for array in arrays)
    return Step("decoder", op, attributes, inputs, tuple(made)), made


WORDS = random_codes(np.dtype(np.uint32), (4, 3))
FLOATS = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
STEPS: dict[str, tuple[str, list[Array], dict[str, Any]]] = {
    "add": ("Add", [FLOATS, FLOATS[0]], {}),
    "add float16": ("Add", [FLOATS.astype(np.float16), FLOATS[0].astype(np.float16)], {}),
    "bits": ("BitwiseAnd", [WORDS, np.array(15, np.uint32)], {}),
    "cast float16": ("Cast", [FLOATS], {"to": TensorProto.FLOAT16}),
    "cast int32": ("Cast", [WORDS], {"to": TensorProto.INT32}),
    "cast int8": ("Cast", [random_codes(np.dtype(np.int32), (9,))], {"to": TensorProto.INT8}),
    "cast words": ("Cast", [WORDS], {"to": TensorProto.FLOAT}),
    "divide": ("Div", [random_codes(np.dtype(np.int32), (9,)), np.array(-7, np.int32)], {}),
    "look up": ("Gather", [FLOATS, np.array([[3, 0], [-1, 2]])], {"axis": 0}),
    "multiply": ("Mul", [FLOATS, FLOATS[:, :1]], {}),
    "multiply float16": ("Mul", [FLOATS.astype(np.float16), FLOATS[:, :1].astype(np.float16)], {}),
    "pad": ("Pad", [FLOATS, np.array([0, 0, 0, 2])], {}),
    "power": ("Pow", [np.float32([2.0, 1.5]), np.float32([-126.0, 3.3])], {}),
    "reshape": ("Reshape", [FLOATS, np.array([0, 2, -1])], {}),
    "shift": ("BitShift", [WORDS, np.array([0, 8, 28], np.uint32)], {"direction": "RIGHT"}),
    "slice": ("Slice", [FLOATS, np.array([1]), np.array([5]), np.array([1])], {}),
    "subtract": ("Sub", [FLOATS, FLOATS[0]], {}),
    "subtract words": ("Sub", [WORDS, np.array(8, np.uint32)], {}),
}


@pytest.mark.parametrize(("op", "arrays", "attributes"), STEPS.values(), ids=STEPS)
def test_every_step_gives_what_onnxruntime_gives(op: str, arrays: list[Array], attributes: dict[str, Any]) -> None:
    one, (made,) = step(op, list(arrays), **attributes)
    wanted = helper.tensor_dtype_to_np_dtype(attributes["to"]) if "to" in attributes else arrays[0].dtype
    assert_same_bits(evaluate([one], made, 25), by_onnxruntime(op, arrays, attributes, wanted))


@pytest.mark.parametrize("name", ["int4", "uint2", "float8_e5m2", "float8_e4m3fn", "float4_e2m1fn", "bfloat16"])
def test_small_types_are_moved_without_being_looked_at(name: str) -> None:
    array = random_codes(dtype_named(name), (4, 6)) if name != "bfloat16" else FLOATS.astype(ml_dtypes.bfloat16)
    moved, (made,) = step("Transpose", [array], perm=[1, 0])
    assert_same_bits(evaluate([moved], made, 25), np.ascontiguousarray(array.T))
    parts, (first, second) = step("Split", [array, np.array([1, 3])], outputs=2, axis=0)
    assert_same_bits(evaluate([parts], first, 25), array[:1])
    assert_same_bits(evaluate([parts], second, 25), array[1:])


def test_small_types_are_cast_by_value() -> None:
    quantized = random_codes(np.dtype(ml_dtypes.int4), (9,))
    cast, (made,) = step("Cast", [quantized], to=TensorProto.FLOAT)
    np.testing.assert_array_equal(evaluate([cast], made, 25), quantized.astype(np.float32))


def test_steps_read_earlier_steps_and_what_is_given() -> None:
    one, (sum_,) = step("Add", [FLOATS, FLOATS])
    fed, twice = Variable("x"), Variable("y")
    two = Step("second", "Mul", {}, (sum_, fed), (twice,))
    np.testing.assert_array_equal(
        evaluate([one, two], twice, 25, {fed: np.float32([3])}), (FLOATS + FLOATS) * np.float32(3)
    )


def test_a_step_that_cannot_be_computed_is_named() -> None:
    one, (made,) = step("Gather", [FLOATS, np.array([99])], axis=0)
    with pytest.raises(ModelError, match=r"node decoder \(Gather\) decodes a weight, but the sample cannot be run"):
        evaluate([one], made, 25)


def test_a_step_is_what_its_node_was() -> None:
    quantized, scale, output = constant("c", np.int8([1])), constant("s", np.float32(2)), Variable("y")
    node = Node("DequantizeLinear", "n", {"axis": 0}, [quantized, scale, Variable("")], [output])
    found = Step.of(node)
    node.inputs.clear()
    assert (found.node, found.op, found.attributes) == ("n", "DequantizeLinear", {"axis": 0})
    assert found.inputs == (quantized.tensor_data, scale.tensor_data, None)
    assert found.outputs == (output,)


def test_only_added_types_are_small() -> None:
    assert all(is_small(dtype_named(name)) for name in ("int4", "float8_e5m2", "float8_e8m0fnu", "bfloat16"))
    assert not any(is_small(np.dtype(name)) for name in ("int8", "uint32", "float16", "<f4", "bool", "object"))


# Evaluation -----------------------------------------------------------------------------------------------------------

SMALL = np.float32([1, 4, 9])
EVALUATION_LARGE = np.arange(40_000, dtype=np.float32).reshape(200, 200)


class Chain:
    """Steps under construction."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def then(self, op: str, *inputs: Variable | np.ndarray, **attributes: Any) -> Variable:
        made = Variable(f"t{len(self.steps)}")
        sources = [tensor if isinstance(tensor, Variable) else ArrayData(tensor) for tensor in inputs]
        self.steps.append(Step(f"n{len(self.steps)}", op, attributes, tuple(sources), (made,)))
        return made


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the sessions that are opened."""
    opened: list[int] = []
    open_session = constant_folding.open_session

    def counted(*args: Any, **options: Any) -> Any:
        opened.append(1)
        return open_session(*args, **options)

    monkeypatch.setattr(constant_folding, "open_session", counted)
    return opened


def test_small_steps_share_a_session(sessions: list[int]) -> None:
    chain = Chain()
    tensor = chain.then("Sqrt", SMALL)
    for _ in range(50):
        tensor = chain.then("Neg", chain.then("Mul", tensor, np.float32([1])))
    found = evaluate_all(chain.steps, [tensor], 17)
    assert found.values[tensor].load().tolist() == [1, 2, 3]
    assert list(found.values) == [tensor]
    assert len(sessions) == 1


def test_large_steps_run_alone_and_only_what_is_read_again_is_held(sessions: list[int]) -> None:
    chain = Chain()
    tensor = chain.then("Neg", chain.then("Sqrt", EVALUATION_LARGE))
    found = evaluate_all(chain.steps, [tensor], 17)
    np.testing.assert_array_equal(found.values[tensor].load(), -np.sqrt(EVALUATION_LARGE))
    assert len(sessions) == 2
    assert list(found.values) == [tensor]


def test_layouts_and_casts_of_what_is_large_are_computed_later_and_take_no_session(sessions: list[int]) -> None:
    chain = Chain()
    turned = chain.then("Transpose", EVALUATION_LARGE)
    cast = chain.then("Cast", chain.then("Reshape", turned, np.array([400, -1])), to=TensorProto.DOUBLE)
    shape = chain.then("Shape", cast)
    found = evaluate_all(chain.steps, [cast, shape], 17)
    assert isinstance(found.values[cast], DerivedTensor)
    np.testing.assert_array_equal(found.values[cast].load(), EVALUATION_LARGE.T.reshape(400, 100).astype(np.float64))
    assert found.values[shape].load().tolist() == [400, 100]
    assert not sessions


def test_a_step_that_fails_takes_along_only_what_depends_on_it() -> None:
    chain = Chain()
    roots = [chain.then("Sqrt", SMALL) for _ in range(9)]
    broken = chain.then("Reshape", chain.then("Neg", roots[4]), np.array([5]))
    behind = chain.then("Neg", broken)
    last = chain.then("Concat", *roots, axis=0)
    found = evaluate_all(chain.steps, [last, behind], 17)
    assert [step.node for step in found.failed] == ["n10", "n11"]
    assert found.values[last].shape == (27,)
    failed = next(iter(found.failed))
    assert isinstance(failed.inputs[0], Variable)
    assert found.values[failed.inputs[0]].load().tolist() == [-1, -2, -3], "what it reads is kept"


def test_results_above_the_limit_and_of_other_kinds_fail() -> None:
    chain = Chain()
    wide = chain.then("Expand", SMALL[:1], np.array([1000]))
    text = chain.then("Cast", SMALL, to=TensorProto.STRING)
    listed = chain.then("SequenceConstruct", SMALL)
    found = evaluate_all(chain.steps, [wide, text, listed], 17, largest=2000)
    assert [step.op for step in found.failed] == ["Expand", "Cast", "SequenceConstruct"]
    assert "too large" in next(iter(found.failed.values()))


def test_a_sequence_between_steps_is_no_obstacle() -> None:
    chain = Chain()
    listed = chain.then("SequenceConstruct", SMALL, SMALL)
    whole = chain.then("ConcatFromSequence", listed, axis=0)
    assert evaluate_all(chain.steps, [whole], 17).values[whole].shape == (6,)


def test_types_that_onnxruntime_hands_out_wrongly_are_computed_alone() -> None:
    chain = Chain()
    numbers = chain.then("Floor", np.float32([1.5, -3.5]))
    quantized = chain.then("Cast", numbers, to=TensorProto.BFLOAT16)
    back = chain.then("Cast", chain.then("Transpose", quantized), to=TensorProto.FLOAT)
    found = evaluate_all(chain.steps, [quantized, back], 17)
    assert found.values[quantized].dtype == ml_dtypes.bfloat16
    assert found.values[back].load().tolist() == [1, -4]


def test_given_values_are_read() -> None:
    chain, fed = Chain(), Variable("x")
    made = chain.then("Sqrt", fed)
    values: dict[Variable, TensorData] = dict(evaluate_all(chain.steps, [made], 17, {fed: SMALL}).values)
    assert values[made].load().tolist() == [1, 2, 3]


def test_a_chain_of_thousands_takes_no_time_when_a_step_in_it_fails() -> None:
    chain = Chain()
    tensor = chain.then("Sqrt", SMALL)
    good = [tensor := chain.then("Neg", tensor) for _ in range(3000)]
    broken = chain.then("Reshape", tensor, np.array([5]))
    found = evaluate_all(chain.steps, [good[-1], broken], 17)
    assert len(found.failed) == 1
    assert found.values[good[-1]].load().tolist() == [1, 2, 3]
