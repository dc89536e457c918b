from __future__ import annotations

from pathlib import Path

import numpy as np
import observations
import onnx
import pytest
from observations import wanted
from onnx import TensorProto, helper

from onnxq.errors import SchemeError
from onnxq.evidence.histogram import Histogram
from onnxq.evidence.value_range import Range
from onnxq.execution.chain import ChainedSamples, parse_chain, with_optional
from onnxq.execution.runner import collect
from onnxq.samples.data import open_samples
from onnxq.samples.inputs import model_inputs


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
