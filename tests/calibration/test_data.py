"""Stateful models: the outputs of a sample are inputs of the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import model
from observations import seen, wanted
from onnx import TensorProto, helper

from onnxq.calibration.accumulators import Range
from onnxq.calibration.collect import collect
from onnxq.calibration.data import ChainedSamples, Data, parse_chain, samples_of, with_optional
from onnxq.calibration.histogram import Histogram
from onnxq.data.dataset import Origin, Subset, origin_of
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import is_truncated, open_samples
from onnxq.errors import DataError, SchemeError

CHAIN = {"total": "before"}
ROWS = [{"x": np.float32([[1, 10]])}, {"x": np.float32([[2, 20]])}, {"x": np.float32([[4, -50]])}]
STREAM = [[0, 0], [1, 10], [3, 30]]


def running_sum(kind: str = "float", dims: str = "[N, 2]") -> onnx.ModelProto:
    """Return a model whose state is the sum of all samples so far."""
    text = f"({kind}{dims} x, {kind}{dims} before) => ({kind}{dims} y, {kind}{dims} total)"
    return model(f"{text} {{ total = Add(x, before) y = Neg(total) }}")


ROW = running_sum(dims="[1, 2]")


def befores(samples: Any) -> list[list[float]]:
    return [sample["before"].ravel().tolist() for sample in samples]


def test_the_output_of_a_sample_is_the_input_of_the_next_and_the_first_may_bring_its_state() -> None:
    samples = ChainedSamples(ROWS, running_sum(), CHAIN)
    assert len(samples) == 3
    assert origin_of(Subset(samples, [0, 2]), 1) == Origin(2)
    assert befores(samples) == befores(samples) == STREAM
    started = [{**ROWS[0], "before": np.float32([[100, 0]])}, *ROWS[1:]]
    assert befores(ChainedSamples(started, running_sum(), CHAIN)) == [[100, 0], [101, 10], [103, 30]]
    statistics = collect(running_sum(), samples, wanted(["total"])).of("total")
    totals = seen(np.float32([1, 10, 3, 30, 7, -20]))
    assert (statistics.need(Range), statistics.need(Histogram)) == (totals.need(Range), totals.need(Histogram))


def test_each_folder_and_each_file_of_several_samples_starts_anew(tmp_path: Path) -> None:
    for name in ("a/1", "a/2", "b/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.savez(tmp_path / f"{name}.npz", x=ROWS[0]["x"])
    for name in ("c", "d"):
        np.savez(tmp_path / f"{name}.npz", x=np.concatenate([row["x"] for row in ROWS]))
    inputs = with_optional(model_inputs(ROW), CHAIN)
    samples = ChainedSamples(open_samples(tmp_path, inputs), running_sum(), CHAIN)
    assert befores(samples) == [*STREAM[:2], STREAM[0], *STREAM, *STREAM]


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_samples_of_a_file_are_chained_in_order_and_limited(suffix: str, tmp_path: Path) -> None:
    onnx.save(ROW, tmp_path / "model.onnx")
    rows, path = np.concatenate([row["x"] for row in ROWS]), tmp_path / f"rows.{suffix}"
    np.save(path, rows) if suffix == "npy" else np.savez(path, x=rows)
    limited = samples_of(tmp_path / "model.onnx", Data(path, limit=2, chain=CHAIN))
    assert befores(samples_of(tmp_path / "model.onnx", Data(path, chain="total=before"))) == STREAM
    assert (befores(limited), is_truncated(limited)) == (STREAM[:2], True)
    whole = [{**row, "before": row["x"]} for row in ROWS]
    assert [set(sample) for sample in samples_of(tmp_path / "model.onnx", whole)] == [{"x", "before"}] * 3


@pytest.mark.parametrize("kind", ["int64", "double", "float"])
def test_a_state_that_is_not_given_is_zero_of_its_type_and_of_the_sizes_of_the_sample(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(kind.upper())))
    samples = ChainedSamples([{"x": np.ones((5, 2), dtype)}] * 2, running_sum(kind), CHAIN)
    assert [(sample["before"].dtype, sample["before"].shape) for sample in samples] == [(dtype, (5, 2))] * 2
    assert (befores(samples)[0], caplog.messages) == ([0] * 10, [])


KEYS = {"keysN": "keys"}


def cache(past: str = "[batch, past, 4]") -> onnx.ModelProto:
    """Return attention over a cache of keys, which grows by those of each sample."""
    signature = f"(float[batch, new, 4] x, float{past} keys) => (float[batch, new, 4] y, float[batch, all, 4] keysN)"
    return model(f"""{signature} {{
        keysN = Concat <axis = 1> (keys, x)
        turned = Transpose <perm = [0, 2, 1]> (keysN)
        products = MatMul (x, turned)
        weights = Softmax <axis = -1> (products)
        y = MatMul (weights, keysN)
    }}""")


def words(*counts: int) -> list[Sample]:
    generator = np.random.default_rng(0)
    return [{"x": generator.normal(size=(1, count, 4)).astype(np.float32)} for count in counts]


@pytest.mark.parametrize("past", ["[batch, past, 4]", "[unk__1, unk__2, 4]", "[other, past, 4]"])
def test_a_cache_starts_empty(past: str, caplog: pytest.LogCaptureFixture) -> None:
    samples = ChainedSamples(words(3, 1, 2), cache(past), KEYS)
    assert [sample["keys"].shape for sample in samples] == [(1, 0, 4), (1, 3, 4), (1, 4, 4)]
    assert caplog.messages == []
    keys = collect(cache(past), samples, wanted(["keys", "keysN"]))
    values = [sample["x"] for sample in words(3, 1, 2)]
    assert keys.of("keysN").need(Range).maximum == max(array.max() for array in values)
    assert keys.of("keys").need(Range).maximum == max(array.max() for array in values[:2])


MEAN = """(float[1, 2] x, float[p, 2] before) => (float[q, 2] y, float[q, 2] total) {
    sum = ReduceSum <keepdims = 0> (before) ones = Exp(before) count = ReduceSum <keepdims = 0> (ones)
    mean = Div(sum, count) total = Add(x, mean) y = Neg(total)
}"""


@pytest.mark.parametrize("text", ["", MEAN], ids=["nothing is added to", "the mean of nothing"])
def test_a_model_that_does_not_run_from_nothing_gets_one_element_and_says_so(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples = ChainedSamples(ROWS, model(text) if text else running_sum(dims="[?, 2]"), CHAIN)
    assert befores(samples) == befores(samples)
    assert befores(samples)[0] == [0, 0]
    (sentence,) = caplog.messages
    assert sentence.startswith(
        "chained input 'before' starts from zeros of shape [1, 2], because the model rejects an empty array; "
    )


def test_a_state_of_unknown_rank_has_to_be_brought() -> None:
    unknown = running_sum()
    unknown.graph.input[1].type.tensor_type.ClearField("shape")
    with pytest.raises(SchemeError, match=r"'before' float32\[any rank\] cannot start from zeros"):
        list(ChainedSamples(ROWS, unknown, CHAIN))
    brought = [{**ROWS[0], "before": np.float32([[100, 0]])}]
    assert befores(ChainedSamples(brought, unknown, CHAIN)) == [[100, 0]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"x": np.zeros(2)}, "the samples are one dictionary, expected a list of them"),
        (5, "the samples are of type int, expected a path or dictionaries"),
        (b"rows", "the samples are of type bytes, expected a path or dictionaries"),
    ],
)
def test_samples_of_another_type_are_refused_before_anything_runs(samples: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Data(samples)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["total"], "Chain 'total' is not OUTPUT=INPUT, expected two names such as 'stateN=state'"),
        (["=before"], "is not OUTPUT=INPUT"),
        (["a="], "is not OUTPUT=INPUT"),
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
    with pytest.raises(SchemeError, match="Every input is chained, expected one that samples feed"):
        with_optional(inputs, {"total": "before", "y": "x"})
