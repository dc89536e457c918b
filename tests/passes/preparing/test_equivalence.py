"""Whether two models compute the same: what counts as a difference, on data and on generated inputs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build
from onnx import ModelProto

from onnxq.errors import CandidateError, DataError
from onnxq.passes.preparing.equivalence import original

SCALED = "(float[N,4] x) => (float[N,4] y, float[N,4] z) { y = Mul(x, factor) z = Mul(x, other) }"


def saved(model: ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def share(first: ModelProto, second: ModelProto, folder: Path, **options: object) -> tuple[str, float]:
    found = original(saved(first, folder / "a.onnx"), **options).difference(saved(second, folder / "b.onnx"))  # type: ignore[arg-type]
    return found.output, found.share


# NaN where the original has it is equal.
@pytest.mark.parametrize("body", ["y = Neg(x)", "y = Log(x)"])
def test_a_model_is_as_it_is_itself(build: Build, tmp_path: Path, body: str) -> None:
    model = build(f"(float[4] x) => (float[4] y) {{ {body} }}")
    assert share(model, model, tmp_path) == ("", 0.0)


def test_a_difference_is_a_share_of_the_largest_value_of_its_output(build: Build, tmp_path: Path) -> None:
    one = build(SCALED, factor=np.float32([2]), other=np.float32([1e6]))
    other = build(SCALED, factor=np.float32([2.02]), other=np.float32([1e6 + 1]))
    output, found = share(one, other, tmp_path)
    assert output == "y"
    assert found == pytest.approx(0.01, rel=1e-4)


def test_samples_are_those_that_are_given(build: Build, tmp_path: Path) -> None:
    relu = build("(float[N,4] x) => (float[N,4] y) { y = Relu(x) }")
    same = build("(float[N,4] x) => (float[N,4] y) { y = Identity(x) }")
    positive = [{"x": np.ones((1, 4), np.float32)}] * 9
    known = original(saved(relu, tmp_path / "a.onnx"), positive)
    assert (known.made_up, len(known.samples)) == (False, 4)
    assert known.difference(saved(same, tmp_path / "b.onnx")).share == 0
    assert share(relu, same, tmp_path)[1] > 0.1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("y = ArgMax<axis=0>(x)", "y = ArgMin<axis=0>(x)"),
        ("y = Identity(x)", "y = Concat<axis=0>(x, x)"),
        ("y = Identity(x)", "y = Cast<to=11>(x)"),
        ("a = Abs(x) y = Log(a)", "a = Abs(x) b = Neg(a) y = Log(b)"),
        ("y = SequenceConstruct(x)", "y = SequenceConstruct(x, x)"),
    ],
)
def test_other_shapes_types_labels_and_what_is_not_finite_are_no_rounding(
    build: Build, tmp_path: Path, first: str, second: str
) -> None:
    models = []
    for nodes in (first, second):
        model = build(f"(float[2] x) => (float[2] y) {{ {nodes} }}")
        model.graph.output[0].ClearField("type")
        models.append(onnx.shape_inference.infer_shapes(model))
    assert share(*models, tmp_path) == ("y", math.inf)


def test_a_model_that_runs_no_made_up_input_needs_data(build: Build, tmp_path: Path) -> None:
    model = build("(float[N] x) => (float[2,3] y) { y = Reshape(x, s) }", s=np.int64([2, 3]))
    with pytest.raises(
        DataError, match=r"the model runs none of 16 generated inputs, the first because .*; give --data"
    ):
        original(saved(model, tmp_path / "a.onnx"))
    assert original(tmp_path / "a.onnx", [{"x": np.ones(6, np.float32)}]).samples


def test_made_up_inputs_that_a_model_refuses_do_not_count(build: Build, tmp_path: Path) -> None:
    model = build("(float[A] x, float[B] z) => (float[C] y) { y = Add(x, z) }")
    known = original(saved(model, tmp_path / "a.onnx"))
    assert len(known.samples) == 4
    assert known.made_up


def test_a_model_that_draws_numbers_cannot_be_compared(build: Build, tmp_path: Path) -> None:
    model = build("(float[4] x) => (float[4] y) { r = RandomNormalLike(x) y = Add(x, r) }")
    with pytest.raises(DataError, match="output 'y' of the model differs between runs"):
        original(saved(model, tmp_path / "a.onnx"))


def test_a_candidate_that_lacks_an_output_or_does_not_load_is_refused(build: Build, tmp_path: Path) -> None:
    model = build("(float[4] x) => (float[4] y) { y = Neg(x) }")
    known = original(saved(model, tmp_path / "a.onnx"))
    model.graph.output[0].name = model.graph.node[0].output[0] = "z"
    with pytest.raises(CandidateError, match="output 'y' is gone"):
        known.difference(saved(model, tmp_path / "b.onnx"))
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(CandidateError, match=r"cannot be loaded by onnxruntime: .* the fault lies in how"):
        known.difference(saved(model, tmp_path / "b.onnx"))


def test_a_candidate_that_does_not_run_is_blamed_and_not_the_sample(build: Build, tmp_path: Path) -> None:
    known = original(saved(build("(float[N] x) => (float[M] y) { y = Neg(x) }"), tmp_path / "a.onnx"))
    other = build("(float[N] x) => (float[M] y) { y = Reshape(x, s) }", s=np.int64([77]))
    with pytest.raises(
        CandidateError, match=r"b.onnx cannot run sample 0 .* the fault lies in how this model was made"
    ):
        known.difference(saved(other, tmp_path / "b.onnx"))
