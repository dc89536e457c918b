"""Each operator of onnx before and after its conversion, in onnxruntime: what another tool converts is compared."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TypeProto, ValueInfoProto, defs, helper, numpy_helper, parser
from onnx_cases import operator_cases

from onnxq.errors import ModelError
from onnxq.ir import read_model, to_model
from onnxq.ir.versions import NEWEST_OPSET
from onnxq.onnx_api import upgrade_opset

OLDEST = 7
"""The first opset that onnxruntime promises to run."""
RNG = np.random.default_rng(0)
SPECIAL = [np.inf, np.nan, -np.inf, 3e38, -0.0]


@dataclass(frozen=True, eq=False)
class Case:
    """A node with the values of its inputs."""

    node: NodeProto
    values: Mapping[str, Any]
    types: Mapping[str, TypeProto] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()

    def model(self, opset: int) -> ModelProto:
        names = list(dict.fromkeys(name for name in self.node.input if name))
        fed = [self._declared(name) for name in names if name not in self.constants]
        stored = [numpy_helper.from_array(self.values[name], name) for name in names if name in self.constants]
        # onnxruntime infers the types of the outputs.
        outputs = [ValueInfoProto(name=name) for name in self.node.output if name]
        graph = helper.make_graph([self.node], "g", fed, outputs, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)

    def _declared(self, name: str) -> ValueInfoProto:
        if name in self.types:
            return ValueInfoProto(name=name, type=self.types[name])
        value = self.values[name]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    @property
    def kind(self) -> tuple[object, ...]:
        kinds = (value.dtype for value in self.values.values() if isinstance(value, np.ndarray))
        return *sorted(proto.name for proto in self.node.attribute), *map(str, kinds), *map(bool, self.node.input)

    def variants(self) -> Iterator[Case]:
        """Yield it in float16, and in both types with infinities, NaN and large numbers."""
        floats = [name for name, value in self.values.items() if getattr(value, "dtype", None) == np.float32]
        if not floats:
            return
        first = self.values[floats[0]]
        with np.errstate(over="ignore"):
            special = first.copy()
            special.reshape(-1)[::2] = np.resize(SPECIAL, special[...].reshape(-1)[::2].size)
            yield self.with_values({floats[0]: special})
            halves = {name: self.values[name].astype(np.float16) for name in floats}
            yield self.with_values(halves)
            yield self.with_values({**halves, floats[0]: special.astype(np.float16)})

    def with_values(self, values: Mapping[str, Any]) -> Case:
        return replace(self, values={**self.values, **values})


@functools.cache
def versions() -> dict[str, list[int]]:
    """Return the opsets in which each operator changes, the oldest that runs first."""
    found: dict[str, set[int]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= NEWEST_OPSET:
            found.setdefault(schema.name, set()).add(max(schema.since_version, OLDEST))
    return {name: sorted(since) for name, since in found.items()}


def as_value(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return np.asarray(numpy_helper.to_array(value))
    return np.asarray(value) if isinstance(value, np.generic) else value


@functools.cache
def onnx_cases() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for model, data in operator_cases().values():
        graph, given = model.graph, data[0][0]
        if len(graph.node) == 1 and not graph.node[0].domain:
            pairs = list(zip(graph.input, given, strict=False))
            values = {info.name: as_value(value) for info, value in pairs}
            types = {info.name: info.type for info, _ in pairs if not info.type.HasField("tensor_type")}
            found.setdefault(graph.node[0].op_type, []).append(Case(graph.node[0], values, types))
    return found


def older(case: Case, opset: int) -> Case | None:
    """Return a case of the newest opset in the form of an older one: inputs that were attributes become attributes."""
    op = case.node.op_type
    old = defs.get_schema(op, opset)
    new = defs.get_schema(op, NEWEST_OPSET)
    if any(proto.name not in old.attributes for proto in case.node.attribute):
        return None
    if op == "Attention" and any(proto.name == "qk_matmul_output_mode" and proto.i for proto in case.node.attribute):
        # It keeps its opset.
        return None
    node = helper.make_node(op, [], case.node.output)
    node.attribute.extend(case.node.attribute)
    formal = [formal.name for formal in new.inputs]
    variadic = bool(new.inputs) and new.inputs[-1].option == defs.OpSchema.FormalParameterOption.Variadic
    for index, name in enumerate(case.node.input):
        role = {"constant_value": "value"}.get(formal[min(index, len(formal) - 1)], formal[min(index, len(formal) - 1)])
        if variadic or (index < len(old.inputs) and role not in old.attributes):
            node.input.append(name)
        elif name and role in old.attributes and isinstance(case.values[name], np.ndarray):
            is_list = old.attributes[role].type.name in ("INTS", "FLOATS")
            if old.attributes[role].type.name.startswith("FLOAT") and case.values[name].dtype.kind != "f":
                return None
            value, kind = case.values[name].reshape(-1).tolist(), int(old.attributes[role].type.value)
            node.attribute.append(helper.make_attribute(role, value if is_list else value[0], attr_type=kind))
        elif name:
            return None
    return replace(case, node=node)


def results(model: ModelProto, values: Mapping[str, Any]) -> list[Any] | None:
    """Run a model as it is written, or return None where onnxruntime does not."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, {given.name: values[given.name] for given in session.get_inputs()})
    except Exception:  # noqa: BLE001 - onnxruntime's errors share no base class
        return None


def difference(expected: Any, found: Any) -> str:
    """Say how two outputs differ by more than the rounding of sums; an empty string where they do not."""
    if isinstance(expected, list):
        return "length" if len(expected) != len(found) else "".join(map(difference, expected, found))
    if not isinstance(expected, np.ndarray):
        return "" if expected == found else "value"
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return f"{found.dtype}{found.shape} for {expected.dtype}{expected.shape}"
    if expected.dtype.kind not in "fV":
        return "" if np.array_equal(expected, found) else "value"
    tolerance = 2e-3 if expected.dtype == np.float16 else 1e-5
    one, other = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return "infinities or NaN"
    error, scale = np.abs(one[finite] - other[finite]).max(initial=0), np.abs(one[finite]).max(initial=0)
    return f"{error:.3g} of {scale:.3g}" if error > tolerance * scale else ""


def faults(case: Case, opset: int, targets: Sequence[int]) -> list[str] | None:
    """Return how a case differs after conversions; None where onnxruntime does not run it, or randomly."""
    model = case.model(opset)
    expected = results(model, case.values)
    if expected is None:
        return None
    found = []
    for version in targets:
        try:
            converted = to_model(upgrade_opset(read_model(model), version))
        except ModelError as error:
            found.append(f"{opset} to {version}: {error}")
            continue
        given = results(converted, case.values)
        problem = "does not run" if given is None else difference(expected, given)
        if problem:
            kinds = [f"{value.dtype}{list(value.shape)}" for value in case.values.values() if hasattr(value, "dtype")]
            text = onnx.printer.to_text(case.node)
            found.append(f"{opset} to {version}: {text} of {', '.join(kinds)}: {problem}")
    return found


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def whole(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


NORMALIZATION = {name: abs(floats(3, 4)) for name in ("s", "b", "m", "v")}
X, IMAGE, NONE = floats(2, 3), floats(1, 2, 4, 4), floats(2, 0)
ROWS: list[tuple[int, str, dict[str, Any]]] = [
    # What a name that begins with x holds is fed, the others are constants.
    *((opset, f"y = Clip{bounds}(x)", {"x": X}) for opset in (7, 10) for bounds in ("", "<min=-0.5>", "<max=0.5>")),
    *((opset, "y = Clip(x)", {"x": X}) for opset in (11, 12)),
    (7, "y, m = Dropout<ratio=0.3>(x)", {"x": X}),
    (10, "y, m = Dropout<ratio=0.3>(x)", {"x": X}),
    (12, "y, m = Dropout(x)", {"x": X}),
    (7, "y = ThresholdedRelu<alpha=0.5>(x)", {"x": X}),
    (7, "y = BatchNormalization<spatial=0>(x, s, b, m, v)", {"x": floats(2, 3, 4), **NORMALIZATION}),
    (8, "y = BatchNormalization<spatial=0, epsilon=0.1>(x, s, b, m, v)", {"x": floats(2, 3, 4), **NORMALIZATION}),
    *(
        (7, f"y = MeanVarianceNormalization{attributes}(x)", {"x": floats(2, 3, 4, 4)})
        for attributes in (
            "",
            "<across_channels=1>",
            "<normalize_variance=0>",
            "<across_channels=1, normalize_variance=0>",
        )
    ),
    *(
        (7, f"y = {op}<axis={axis}>(x)", {"x": floats(*shape)})
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for shape in ((2, 3), (2, 0), (0, 3), (2, 3, 4), (2, 3, 0), (2, 3, 1, 1), (2, 1, 3))
        for axis in range(len(shape))
    ),
    *((11, f"y = {op}<axis=-2>(x)", {"x": floats(2, 3, 4)}) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    *(
        (opset, f'y = {op}<mode="{mode}">(x, {scales})', {"x": IMAGE, scales: np.array([1, 1, *pair], np.float32)})
        for opset, op in ((9, "Upsample"), (10, "Resize"))
        for mode in ("linear", "nearest")
        for pair in ((2, 2), (1.5, 3), (1.3, 1.7), (0.5, 3), (0.6, 0.7), (1, 1))
        for scales in ("s", "x_scales")
    ),
    *(
        (7, f'y = Upsample<mode="{mode}", scales=[1.0, 1.0, {pair}]>(x)', {"x": IMAGE})
        for mode in ("linear", "nearest")
        for pair in ("2.0, 2.0", "1.5, 3.0", "1.3, 1.7")
    ),
    *(
        (
            11,
            f'y = Resize<mode="{mode}", coordinate_transformation_mode="{place}", nearest_mode="{nearest}">(x, r, s)',
            {"x": IMAGE, "r": floats(0), "s": np.array([1, 1, 1.3, 0.6], np.float32)},
        )
        for mode, nearest in (("linear", "floor"), ("nearest", "ceil"), ("cubic", "floor"))
        for place in ("half_pixel", "asymmetric", "align_corners")
    ),
    *((7, f'y = Pad<mode="{mode}", pads=[0, 1, 0, 1], value=2.5>(x)', {"x": X}) for mode in ("constant", "reflect")),
    (7, "y = Pad<pads=[0, -1, 0, 1]>(x)", {"x": X}),
    (7, "y, i = TopK<k=2, axis=0>(x)", {"x": floats(3, 4)}),
    (7, "y = GlobalLpPool<p=3>(x)", {"x": IMAGE}),
    (7, "y = MaxRoiPool<pooled_shape=[2, 2]>(x, r)", {"x": IMAGE, "r": np.array([[0, 1, 1, 3, 3]], np.float32)}),
    (
        10,
        "y = RoiAlign<output_height=2, output_width=2, sampling_ratio=2>(x, r, i)",
        {"x": IMAGE, "r": np.array([[0, 0, 3, 3]], np.float32), "i": whole(0)},
    ),
    *((7, f"y = {op}<seed=1.0, shape=[2, 3]>()", {}) for op in ("RandomNormal", "RandomUniform")),
    *((7, f"y = {op}<seed=1.0>(x)", {"x": X}) for op in ("RandomNormalLike", "RandomUniformLike", "Multinomial")),
    (
        7,
        """y = Loop<body = b(int64 i, bool c, float[2, 3] a) => (bool d, float[2, 3] e) {
            d = Identity(c) e = Add(a, a)
        }>(n, k, x)""",
        {"x": X, "n": np.array(3), "k": np.array(True)},
    ),
    (7, "y = DepthToSpace<blocksize=2>(x)", {"x": floats(1, 8, 2, 2)}),
    (11, "y = Scatter<axis=1>(x, i, u)", {"x": X, "i": whole(1).reshape(1, 1), "u": floats(1, 1)}),
    (
        18,
        "y = GroupNormalization<num_groups=2>(x, s, b)",
        {"x": floats(2, 4, 3), "s": floats(2), "b": floats(2)},
    ),
]


def row_case(text: str, values: Mapping[str, Any]) -> Case:
    node = parser.parse_node(text)
    return Case(node, values, constants=frozenset(name for name in node.input if not name.startswith("x")))


@functools.cache
def row_cases() -> list[tuple[int, Case]]:
    return [(opset, row_case(text, values)) for opset, text, values in ROWS]


KEPT = {
    "Bernoulli": (22, "y = Bernoulli(x)"),
    "GlobalLpPool": (22, "y = GlobalLpPool(x)"),
    "MaxRoiPool": (22, "y = MaxRoiPool<pooled_shape=[2, 2]>(x, r)"),
    "Multinomial": (22, "y = Multinomial(x)"),
    "RandomNormal": (22, "y = RandomNormal<shape=[2]>()"),
    "RandomNormalLike": (22, "y = RandomNormalLike(x)"),
    "RandomUniform": (22, "y = RandomUniform<shape=[2]>()"),
    "RandomUniformLike": (22, "y = RandomUniformLike(x)"),
    "RoiAlign": (22, "y = RoiAlign(x, r, i)"),
    "Scan": (9, "y = Scan<body = b(float a) => (float c) { c = Neg(a) }, num_scan_inputs = 1>(x, i)"),
}
"""Operators that keep their model below an opset."""

NO_CASE = "onnx has no case of this node alone, and the operator has one version"
UNREACHED: dict[str, tuple[set[int], str]] = {
    **{op: ({first}, "onnxruntime has no kernel") for op, (first, _) in KEPT.items() if op != "Scan"},
    **dict.fromkeys(
        (
            "ConcatFromSequence",
            "SequenceAt",
            "SequenceConstruct",
            "SequenceEmpty",
            "SequenceErase",
            "SequenceLength",
        ),
        ({11}, NO_CASE),
    ),
    "Optional": ({15}, NO_CASE),
    "ImageDecoder": ({20}, "onnxruntime has no kernel"),
    "Scatter": ({11}, "it is gone, ScatterElements took its place"),
    "Upsample": ({10}, "it is gone, Resize took its place"),
}
"""Opsets at which nothing is compared, and why."""


def targets_of(op: str, opset: int) -> list[int]:
    """Return the next opset in which an operator changes, and the newest; those that it can be converted to."""
    following = [version for version in versions()[op] if version > opset][:1]
    first = KEPT[op][0] if op in KEPT else 0
    last = first - 1 if opset < first else NEWEST_OPSET
    return sorted({min(version, last) for version in (*following, NEWEST_OPSET)} - {opset})


@pytest.mark.parametrize("op", sorted(op for op in versions()))
def test_an_operator_computes_the_same_in_later_opsets(op: str) -> None:
    found: list[str] = []
    unreached = set()
    written = [(opset, case) for opset, case in row_cases() if case.node.op_type == op]
    for opset in sorted({*versions()[op], *(first for first, _ in written)} - {NEWEST_OPSET}):
        rows = [case for first, case in written if first == opset]
        given = [older(case, opset) for case in onnx_cases().get(op, ())] if defs.has(op, opset, "") else []
        seen: set[object] = set()
        for case in [*rows, *(case for case in given if case is not None)]:
            if case in rows or case.kind not in seen:
                told = faults(case, opset, targets_of(op, opset))
                if told is not None:
                    found += told
                    others = case.variants() if not seen and len(versions()[op]) > 1 else ()
                    found += [fault for one in others for fault in faults(one, opset, targets_of(op, opset)) or ()]
                    seen.add(case.kind)
        if not seen:
            unreached.add(opset)
    assert not found, "\n".join(found)
    assert unreached == UNREACHED.get(op, (set(), ""))[0]


# Of float64, onnxruntime runs these as functions, up to opset 18.
FUNCTIONS = ("Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Selu", "Softplus", "Softsign", "ThresholdedRelu")


@pytest.mark.parametrize(
    ("opset", "text"),
    [
        *((first - 1, text) for first, text in KEPT.values()),
        (24, "y, k, v, s = Attention<qk_matmul_output_mode=2>(x, r, i)"),
        *((18, f"y = {op}(x)") for op in FUNCTIONS),
        (18, "y = PRelu(x, r)"),
    ],
    ids=[*KEPT, "Attention", *FUNCTIONS, "PRelu"],
)
def test_an_operator_that_keeps_its_opset_is_named_with_what_to_do(opset: int, text: str) -> None:
    case = row_case(text, dict.fromkeys(("x", "r", "i"), np.zeros(1)))
    message = rf"^node 'y' \({case.node.op_type}\) cannot be converted from opset {opset} to 26: .*; (choose|export) "
    with pytest.raises(ModelError, match=message) as caught:
        upgrade_opset(read_model(case.model(opset)), NEWEST_OPSET)
    assert "\n" not in str(caught.value)
