from __future__ import annotations

from pathlib import Path

import numpy as np
import observations
import onnx
import pytest
from observations import wanted
from onnx import TensorProto, helper

from onnxq.calibration.accumulators import Range
from onnxq.calibration.collect import collect
from onnxq.calibration.data import ChainedSamples, Data, parse_chain, samples_of, with_optional
from onnxq.calibration.histogram import Histogram
from onnxq.data.dataset import Origin, Subset, origin_of
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import is_truncated, open_samples
from onnxq.errors import SchemeError


def running_sum(dtype: int = TensorProto.FLOAT, dims: tuple[object, ...] = ("N", 2)) -> onnx.ModelProto:
    """Return total = x + before, y = -total: the state is the sum of all samples so far."""
    nodes = [helper.make_node("Add", ["x", "before"], ["total"]), helper.make_node("Neg", ["total"], ["y"])]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, dtype, dims) for name in names]
        for names in (("x", "before"), ("y", "total"))
    )
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CHAIN = {"total": "before"}
ROWS = [{"x": np.float32([[1, 10]])}, {"x": np.float32([[2, 20]])}, {"x": np.float32([[4, -50]])}]


def befores(samples: object) -> list[list[float]]:
    return [sample["before"].ravel().tolist() for sample in samples]  # type: ignore[attr-defined]


def test_the_output_of_a_sample_is_the_input_of_the_next() -> None:
    samples = ChainedSamples(ROWS, running_sum(), CHAIN)
    assert len(samples) == 3
    assert origin_of(Subset(samples, [0, 2]), 1) == Origin(2)
    assert befores(samples) == befores(samples) == [[0, 0], [1, 10], [3, 30]]


def test_the_first_sample_may_bring_its_state() -> None:
    started = [{**ROWS[0], "before": np.float32([[100, 0]])}, *ROWS[1:]]
    assert befores(ChainedSamples(started, running_sum(), CHAIN)) == [[100, 0], [101, 10], [103, 30]]


def test_statistics_are_those_of_the_stream() -> None:
    samples = ChainedSamples(ROWS, running_sum(), CHAIN)
    seen = collect(running_sum(), samples, wanted(["total"])).of("total")
    assert (seen.need(Range).minimum, seen.need(Range).maximum) == (-20, 30)
    totals = observations.seen(np.float32([1, 10, 3, 30, 7, -20]))
    assert seen.need(Histogram) == totals.need(Histogram)


def test_each_folder_and_each_file_of_several_samples_starts_anew(tmp_path: Path) -> None:
    inputs = with_optional(model_inputs(running_sum(dims=(1, 2))), CHAIN)
    for name in ("a/1", "a/2", "b/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.savez(tmp_path / f"{name}.npz", x=ROWS[0]["x"])
    for name in ("c", "d"):
        np.savez(tmp_path / f"{name}.npz", x=np.concatenate([row["x"] for row in ROWS]))
    samples = ChainedSamples(open_samples(tmp_path, inputs), running_sum(), CHAIN)
    streams = [[[0, 0], [1, 10]], [[0, 0]], [[0, 0], [1, 10], [3, 30]], [[0, 0], [1, 10], [3, 30]]]
    assert befores(samples) == [before for stream in streams for before in stream]


def test_samples_of_a_file_are_chained_and_limited_where_that_is_said(tmp_path: Path) -> None:
    onnx.save(running_sum(dims=(1, 2)), tmp_path / "model.onnx")
    rows = tmp_path / "rows.npz"
    np.savez(rows, x=np.concatenate([row["x"] for row in ROWS]))
    assert befores(samples_of(tmp_path / "model.onnx", Data(rows, chain=CHAIN))) == [[0, 0], [1, 10], [3, 30]]
    limited = samples_of(tmp_path / "model.onnx", Data(rows, limit=2, chain=CHAIN))
    assert befores(limited) == [[0, 0], [1, 10]]
    assert is_truncated(limited)
    assert len(samples_of(tmp_path / "model.onnx", [{**row, "before": row["x"]} for row in ROWS])) == 3


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_files_may_leave_the_state_out(suffix: str, tmp_path: Path) -> None:
    inputs = with_optional(model_inputs(running_sum(dims=(1, 2))), CHAIN)
    rows = np.concatenate([row["x"] for row in ROWS])
    path = tmp_path / f"rows.{suffix}"
    np.save(path, rows) if suffix == "npy" else np.savez(path, x=rows)
    assert [sample["x"].tolist() for sample in open_samples(path, inputs)] == [row["x"].tolist() for row in ROWS]
    np.savez(tmp_path / "with.npz", x=rows[:1], before=rows[:1])
    (sample,) = open_samples(tmp_path / "with.npz", inputs)
    assert set(sample) == {"x", "before"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["total"], "'total' is not OUTPUT=INPUT"),
        (["=before"], "is not OUTPUT=INPUT"),
        (["a=c", "b=c"], "'b=c' names an output or input again"),
        (["a=b", "a=c"], "'a=c' names an output or input again"),
    ],
)
def test_a_wrong_chain_is_told_why(texts: list[str], message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        parse_chain(texts)


def test_names_that_are_not_there_get_a_suggestion() -> None:
    inputs = model_inputs(running_sum())
    with pytest.raises(SchemeError, match="ends in 'befor', expected an input of the model; did you mean 'before'"):
        with_optional(inputs, {"total": "befor"})
    with pytest.raises(SchemeError, match="begins with 'totl', expected an output of the model; did you mean 'total'"):
        ChainedSamples(ROWS, running_sum(), {"totl": "before"})
    with pytest.raises(SchemeError, match="Every input is chained"):
        with_optional(inputs, {"total": "before", "y": "x"})


@pytest.mark.parametrize("dtype", [TensorProto.INT64, TensorProto.DOUBLE, TensorProto.FLOAT])
def test_a_state_that_is_not_given_is_zero_of_its_type(dtype: int) -> None:
    plain = np.dtype(helper.tensor_dtype_to_np_dtype(dtype))
    (sample,) = ChainedSamples([{"x": np.ones((1, 2), plain)}], running_sum(dtype), CHAIN)
    assert sample["before"].dtype == plain
    assert sample["before"].tolist() == [[0, 0]]


def cache(past: str) -> onnx.ModelProto:
    """Return attention over a cache of keys, which grows by those of each sample."""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[batch, new, 4] x, float{past} keys) => (float[batch, new, 4] y, float[batch, all, 4] keysN) {{
            keysN = Concat <axis = 1> (keys, x)
            turned = Transpose <perm = [0, 2, 1]> (keysN)
            products = MatMul (x, turned)
            weights = Softmax <axis = -1> (products)
            y = MatMul (weights, keysN)
        }}""")


KEYS = {"keysN": "keys"}


def words(*counts: int) -> list[Sample]:
    generator = np.random.default_rng(0)
    return [{"x": generator.normal(size=(1, count, 4)).astype(np.float32)} for count in counts]


@pytest.mark.parametrize("past", ["[batch, past, 4]", "[unk__1, unk__2, 4]", "[other, past, 4]"])
def test_a_cache_starts_without_a_phantom(past: str) -> None:
    told: list[str] = []
    samples = ChainedSamples(words(3, 1, 2), cache(past), KEYS, told.append)
    assert [sample["keys"].shape for sample in samples] == [(1, 0, 4), (1, 3, 4), (1, 4, 4)]
    assert told == []


def test_a_named_dimension_is_that_of_the_sample() -> None:
    rows = [{"x": np.ones((5, 2), np.float32)}] * 2
    told: list[str] = []
    samples = ChainedSamples(rows, running_sum(), CHAIN, told.append)
    assert [sample["before"].shape for sample in samples] == [(5, 2), (5, 2)]
    assert told == []


def test_statistics_of_a_cache_are_those_of_what_was_given() -> None:
    given = words(3, 1)
    found = collect(
        cache("[batch, past, 4]"), ChainedSamples(given, cache("[batch, past, 4]"), KEYS), wanted(["keys", "keysN"])
    )
    values = np.concatenate([sample["x"].ravel() for sample in given])
    assert found.of("keysN").need(Range).minimum == values.min()
    assert found.of("keysN").need(Range).maximum == values.max()
    assert found.of("keys").need(Range).maximum == given[0]["x"].max()


MEAN = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 2] x, float[p, 2] before) => (float[q, 2] y, float[q, 2] total) {
        sum = ReduceSum <keepdims = 0> (before)
        ones = Exp(before)
        count = ReduceSum <keepdims = 0> (ones)
        mean = Div(sum, count)
        total = Add(x, mean)
        y = Neg(total)
    }"""


@pytest.mark.parametrize(
    "model",
    [running_sum(dims=(None, 2)), onnx.parser.parse_model(MEAN)],
    ids=["nothing is added to", "the mean of nothing"],
)
def test_a_model_that_does_not_run_from_nothing_gets_one_element_and_says_so(model: onnx.ModelProto) -> None:
    told: list[str] = []
    samples = ChainedSamples(ROWS, model, CHAIN, told.append)
    assert befores(samples) == befores(samples)
    assert befores(samples)[0] == [0, 0]
    (sentence,) = told
    assert sentence.startswith(
        "chained input 'before' starts from zeros of shape [1, 2], since the model does not run from an empty one; "
    )


def test_a_state_of_unknown_rank_has_to_be_brought() -> None:
    model = running_sum()
    model.graph.input[1].type.tensor_type.ClearField("shape")
    with pytest.raises(SchemeError, match=r"'before' float32\[any rank\] has no zeros to start from"):
        list(ChainedSamples(ROWS, model, CHAIN))
    brought = [{**ROWS[0], "before": np.float32([[100, 0]])}]
    assert befores(ChainedSamples(brought, model, CHAIN)) == [[100, 0]]
