from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from observations import wanted

from onnxq.calibration import calibrate
from onnxq.calibration.accumulators import Range
from onnxq.calibration.calibrate import (
    evidence_bytes,
    group_by_bytes,
    hungriest,
    largest_segment,
    measure_tensor_bytes,
    peak_memory,
    plan_passes,
)
from onnxq.calibration.collect import collect
from onnxq.calibration.kinds import default_request
from onnxq.calibration.segments import Segment
from onnxq.data.inputs import Sample
from onnxq.errors import CandidateError, DataError, RunError
from onnxq.runtime.sessions import Session, run

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
SAMPLE = {"image": np.load(MODEL.parent / "data" / "calib.npz")["image"][:3]}


def test_sizes_are_those_of_the_tensors() -> None:
    graph = onnx.load(MODEL).graph
    names = [node.output[0] for node in graph.node if node.op_type == "Conv"]
    sizes = measure_tensor_bytes(MODEL, SAMPLE, [*names, "image", graph.output[0].name])
    seen = collect(MODEL, [SAMPLE], wanted(names))
    assert {name: sizes[name] for name in names} == {name: 4 * seen.of(name).need(Range).count for name in names}
    assert sizes["image"] == sizes[graph.output[0].name] == 0


def test_a_model_of_sizes_that_fails_is_not_told_of_as_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [onnx.load(MODEL).graph.node[0].output[0]]
    with pytest.raises(RunError, match="the sample cannot be run"):
        measure_tensor_bytes(MODEL, {"image": SAMPLE["image"][0]}, names)

    def fail(session: Session, sample: Sample, outputs: list[str] | None = None) -> list[object]:
        if outputs:
            raise RunError("the sample cannot be run") from RuntimeError("no kernel")
        return run(session, sample)

    monkeypatch.setattr(calibrate, "run", fail)
    with pytest.raises(CandidateError, match=r"the float model runs a sample, but not with the sizes .*\(no kernel\)"):
        measure_tensor_bytes(MODEL, SAMPLE, names)


@pytest.mark.parametrize(
    ("limit", "groups"),
    [(9, (("a", "b", "c"),)), (8, (("a", "b"), ("c",))), (5, (("a", "b"), ("c",))), (4, (("a",), ("b",), ("c",)))],
)
def test_groups_keep_the_order_and_the_limit(limit: int, groups: tuple[tuple[str, ...], ...]) -> None:
    assert group_by_bytes({"a": 3, "b": 2, "c": 4}, limit) == groups


@pytest.mark.parametrize("limit", [3, 0, -1])
def test_a_tensor_beyond_the_limit_is_named(limit: int) -> None:
    with pytest.raises(DataError, match=rf"Tensor 'c' takes 4 bytes, expected at most the {max(limit, 0)} that"):
        group_by_bytes({"c": 4}, limit)


PARTS = (
    Segment(b"", ("x",), ("a", "b", "c"), frozenset("c")),
    Segment(b"", ("c",), ("d", "e"), frozenset()),
)
SIZES = {"x": 0, "a": 3, "b": 2, "c": 4, "d": 6, "e": 1}


@pytest.mark.parametrize(
    ("limit", "passes"),
    [
        (13, (("x", "a", "b", "c", "d", "e"),)),
        (11, (("x", "a", "b", "d", "e"), ("c",))),
        (10, (("x", "a", "b", "d"), ("c", "e"))),
    ],
)
def test_each_pass_takes_a_share_of_every_segment(limit: int, passes: tuple[tuple[str, ...], ...]) -> None:
    assert plan_passes(PARTS, SIZES, SIZES, limit) == passes
    assert plan_passes(PARTS, SIZES, ["e", "x"], limit) == (("x", "e"),)


def test_what_crosses_counts_beside_the_tensors_of_a_segment() -> None:
    assert largest_segment(PARTS, SIZES) == 4 + 3 + 2 + 4
    with pytest.raises(DataError, match="Tensor 'd' takes 6 bytes, expected at most the 5"):
        plan_passes(PARTS, SIZES, SIZES, 9)
    assert hungriest(PARTS, SIZES, SIZES) == ("d", 10)
    assert hungriest(PARTS, SIZES, ["x"]) == ("", 0)


def test_memory_is_counted_in_bytes() -> None:
    before = peak_memory()
    ballast = np.ones(50_000_000, np.uint8)
    assert 10_000_000 < before <= peak_memory() < 10**12
    assert peak_memory() > ballast.nbytes


def test_the_bytes_of_evidence_are_about_those_that_it_takes() -> None:
    names = [node.output[0] for node in onnx.load(MODEL).graph.node if node.op_type == "Conv"]
    kinds = (("range", None), ("histogram", None), ("sample-extremes", None), ("channel-means", 1), ("hessian", 1))
    samples = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:4]]
    sizes = measure_tensor_bytes(MODEL, samples[0], names)
    for kind, axis in kinds:
        requests = [default_request(name, kind, axis) for name in names]
        found = sys.getsizeof(collect(MODEL, samples, requests))
        said = sum(evidence_bytes(requests, sizes, len(samples)).values())
        assert found / 4 < said < found * 20, kind
