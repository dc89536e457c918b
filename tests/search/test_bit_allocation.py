"""Bits and blocks of each weight: the least error in a size, and the smallest size for a goal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Build, Samples
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto

from onnxq import AccuracyError, Budget, Goal, load_report, quantize
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import QuantSpec
from onnxq.errors import SchemeError
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.metrics import Metric
from onnxq.ir import as_graph, load, save
from onnxq.planning.plan import Plan
from onnxq.report.refusal import suggestions, why_not_faster
from onnxq.report.report import summary_rows
from onnxq.runtime.sessions import open_session
from onnxq.runtime.sessions import run as run_session
from onnxq.runtime.targets import TARGETS, Target
from onnxq.search.bit_allocation import (
    FormatFrontier,
    Nodes,
    WeightFormat,
    candidate_specs,
    plan_of,
    weight_formats,
    with_measured,
)
from onnxq.search.prepared_model import PreparedModel, open_prepared_model

CPU = TARGETS["onnxruntime-cpu"]
QUICK = Budget(accuracy="off", latency_seconds=0)
FOUR, EIGHT = QuantSpec("int4", (32,)), QuantSpec("int8-narrow", (32,))

# Which formats there are


@pytest.mark.parametrize(
    ("spec", "target", "formats"),
    [
        (QuantSpec("int4", (32,)), CPU, {"int2", "int4", "int8-narrow"}),
        (QuantSpec("uint4", (32,), symmetric=False), CPU, {"uint2", "uint4", "uint8"}),
        (QuantSpec("int8", (64,)), CPU, {"int2", "int4", "int8"}),
        (QuantSpec("int4", (32,)), TARGETS["openvino"], {"int4", "int8-narrow"}),
        (QuantSpec("float4e2m1", (32,)), CPU, set()),
        (QuantSpec("int8"), CPU, set()),
    ],
)
def test_formats_are_of_the_kind_of_the_scheme_and_of_bits_that_the_target_reads(
    spec: QuantSpec, target: Target, formats: set[str]
) -> None:
    assert {one.format for one in candidate_specs(spec, target)} == formats


Formats = Mapping[Nodes, Sequence[WeightFormat]]


def opened(model: ModelProto, folder: Path) -> PreparedModel:
    return open_prepared_model(as_graph(model), PRESETS["int4-block32"], CPU, folder)


def test_more_bits_and_smaller_blocks_take_more_bytes_and_have_less_error(build: Build, tmp_path: Path) -> None:
    model = build("(float[2,128] x) => (float[2,64] y) { y = MatMul(x, w) }", w=(128, 64))
    [formats] = weight_formats(opened(model, tmp_path)).values()
    by_spec = {(one.spec.format, one.spec.granularity): one for one in formats[:-1] if one.spec is not None}
    assert formats[-1] == WeightFormat(None, 4 * 128 * 64, 0.0)
    assert by_spec["int4", (32,)].bytes == 128 * 64 // 2 + 128 * 64 // 32 * 4
    for few, more in itertools.pairwise(("int2", "int4", "int8-narrow")):
        assert by_spec[few, (32,)].error > 4 * by_spec[more, (32,)].error
    assert by_spec["int4", (128,)].error > by_spec["int4", (16,)].error


def test_a_table_that_is_also_multiplied_is_counted_once(build: Build, tmp_path: Path) -> None:
    model = build(
        "(int64[2,3] ids) => (float[2,3,512] y) { h = Gather(w, ids) g = Tanh(h) t = Transpose<perm = [1, 0]>(w) "
        "y = MatMul(g, t) }",
        w=(512, 64),
    )
    [(nodes, formats)] = weight_formats(opened(model, tmp_path)).items()
    assert len(nodes) == 2
    assert formats[-1].bytes == 4 * 512 * 64


def test_weights_that_no_kernel_multiplies_with_2_bits_have_more(build: Build, tmp_path: Path) -> None:
    # Their columns do not fill bytes.
    model = build("(float[2,128] x) => (float[2,67] y) { y = MatMul(x, w) }", w=(128, 67))
    [formats] = weight_formats(opened(model, tmp_path)).values()
    assert {one.spec.format for one in formats[:-1] if one.spec is not None} == {"int4", "int8-narrow"}


def test_what_is_not_measured_follows_the_nearest_measured_format() -> None:
    fine = QuantSpec("int8-narrow", (16,))
    formats = {("a",): [WeightFormat(FOUR, 1, 1e-2), WeightFormat(EIGHT, 2, 1e-4), WeightFormat(fine, 3, 5e-5)]}
    measured = {("a",): {FOUR: 2e-2, EIGHT: 1e-3}}
    assert [one.error for one in with_measured(formats, measured)["a",]] == pytest.approx([2e-2, 1e-3, 5e-4])
    assert with_measured(formats, {}) == formats


# The least error in some bytes

numbers = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0, 10)), min_size=1, max_size=5, unique_by=lambda one: one[0]
)


def groups_of(*groups: Sequence[tuple[int, float]]) -> Formats:
    """Return formats of a few weights from bytes and errors."""
    return {(str(index),): [WeightFormat(None, *one) for one in group] for index, group in enumerate(groups)}


@given(st.lists(numbers, min_size=1, max_size=4), st.integers(0, 250))
def test_a_size_is_kept_with_no_more_error_than_steps_alone(groups: list[Any], most: int) -> None:
    frontier = FormatFrontier.of(groups_of(*groups))
    smallest, allocation = frontier.within(0), frontier.within(most)
    assert allocation.bytes <= max(most, smallest.bytes)
    assert allocation.error <= frontier.within(allocation.bytes - 1).error or allocation.bytes == smallest.bytes
    sums = [
        (sum(format.bytes for format in some), sum(format.error for format in some))
        for some in itertools.product(*frontier.hulls.values())
    ]
    best = min((error for size, error in sums if size <= most), default=None)
    if best is not None and len(groups) < 3:
        assert allocation.error == pytest.approx(best)


def test_a_large_weight_gets_its_bytes_before_small_ones_that_gain_more_for_theirs() -> None:
    small, large = [(1, 0.2), (2, 0.0)], [(100, 10.0), (200, 0.0)]
    allocation = FormatFrontier.of(groups_of(small, small, small, small, large)).within(206)
    assert allocation.formats["4",].bytes == 200
    assert allocation.bytes == 206


def test_the_size_for_an_error_is_about_the_smallest() -> None:
    frontier = FormatFrontier.of(groups_of(*[[(1000, 1.0), (2000, 0.0)]] * 9))
    assert frontier.reaching(9.0).bytes == 9000
    assert frontier.reaching(4.5).bytes == 14000
    assert frontier.reaching(-1.0).bytes == frontier.reaching(math.nan).bytes == 18000


def test_the_plan_has_the_formats_that_were_chosen(build: Build, tmp_path: Path) -> None:
    model = opened(build("(float[2,128] x) => (float[2,64] y) { y = MatMul(x, w) }", w=(128, 64)), tmp_path)
    frontier = FormatFrontier.of(weight_formats(model))
    plans = [plan_of(model, allocation) for allocation in (frontier.within(0), frontier.finest, frontier.floats)]
    assert [[weight.spec.format for one in plan.decisions for weight in one.weights] for plan in plans] == [
        ["int2"],
        ["int8-narrow"],
        [],
    ]


# Models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, build: Build) -> Path:
    """A model one of whose two weights makes nearly all of the output."""
    generator = np.random.default_rng(0)
    strong, weak = (generator.standard_normal((256, 256)).astype(np.float32) * size for size in (1.0, 0.05))
    path = tmp_path_factory.mktemp("mixed") / "model.onnx"
    text = "(float[batch, 256] x) => (float[batch, 256] y) { a = MatMul(x, w0) b = MatMul(x, w1) y = Add(a, b) }"
    onnx.save(build(text, w0=strong, w1=weak), path)
    return path


@pytest.fixture(scope="module")
def given_samples() -> tuple[Samples, Samples]:
    generator = np.random.default_rng(1)
    every = [{"x": generator.standard_normal((4, 256)).astype(np.float32)} for _ in range(24)]
    return every[:16], every[16:]


def run(model: Path, data: Samples | None, output: Path, **options: Any) -> Any:
    goal, budget = Goal(**{"min_sqnr": 5, **options}), QUICK
    return quantize(model, data, output, scheme="int4-block32", goal=goal, budget=budget).report


def bits_of(plan: Plan) -> list[int]:
    return [
        int(one.weights[0].spec.format[3]) if one.weights else 32 for one in plan.decisions if one.op_type == "MatMul"
    ]


@pytest.mark.parametrize("has_samples", [True, False])
def test_the_size_is_kept_and_bits_go_where_they_matter(
    model: Path, given_samples: tuple[Samples, Samples], tmp_path: Path, has_samples: bool
) -> None:
    calibration, others = given_samples
    report = run(model, calibration if has_samples else None, tmp_path / "q.onnx", max_size=0.21)
    uniform = run(model, calibration, tmp_path / "u.onnx", force=True)
    assert report.size_ratio <= 0.21
    assert (tmp_path / "q.onnx").stat().st_size <= 0.21 * model.stat().st_size
    if has_samples:
        strong, weak = bits_of(report.plan)
        assert strong > weak
        reached, alike = (compare_files(model, tmp_path / name, others).worst_sqnr for name in ("q.onnx", "u.onnx"))
        assert reached > alike + 6
    assert uniform.search.sizes == ()
    assert report.search.sizes[0].bytes < report.files.bytes < report.search.sizes[-1].bytes
    assert [one.sqnr is None for one in report.search.sizes] == [not has_samples] * len(report.search.sizes)
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json").search.sizes == report.search.sizes


def test_the_smallest_file_reaches_the_goal(
    model: Path, given_samples: tuple[Samples, Samples], tmp_path: Path
) -> None:
    low, high = (
        run(model, given_samples[0], tmp_path / "q.onnx", min_sqnr=sqnr, prefer="size") for sqnr in (12.0, 40.0)
    )
    assert low.size_ratio < 0.15 < high.size_ratio < 0.3
    assert low.agreement.worst_sqnr >= 12
    assert high.agreement.worst_sqnr >= 40
    assert compare_files(model, tmp_path / "q.onnx", given_samples[1]).worst_sqnr >= 39


def test_weights_are_float_if_the_size_allows_it_and_the_table_shows_it(
    model: Path, given_samples: tuple[Samples, Samples], tmp_path: Path
) -> None:
    report = run(model, given_samples[0], tmp_path / "q.onnx", max_size=0.7)
    assert [one.finer for one in report.plan.decisions if not one.weights and one.op_type == "MatMul"] == [
        "its error counts more than its size, even with 8 bits"
    ]
    [row] = [row.text for row in summary_rows(report) if row.name == "weights"]
    assert row == "1 of 8 bits, 1 in float"
    assert (report.encoding.delivered, why_not_faster(report), suggestions(report)) == ((), "", ())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"max_size": 0.02},
            r"the smallest model has .* kB, expected .* kB or less; nothing was written; raise max_size",
        ),
        ({"max_size": "5kB"}, "expected 5.0 kB or less"),
        (
            {"max_size": 0.16, "min_sqnr": 33},
            r"expected 33 dB or more; nothing was written; raise max_size= to about 0\.18",
        ),
        ({"max_size": 0.16, "min_sqnr": 33, "prefer": "size"}, "the smallest model found that keeps the goal has"),
    ],
)
def test_a_size_that_is_too_small_is_refused_with_the_nearest(
    model: Path,
    given_samples: tuple[Samples, Samples],
    tmp_path: Path,
    options: Mapping[str, Any],
    sentence: str,
) -> None:
    with pytest.raises(AccuracyError, match=sentence):
        run(model, given_samples[0], tmp_path / "q.onnx", **options)
    assert not (tmp_path / "q.onnx").exists()


@pytest.mark.parametrize(("size", "is_enough"), [(0.16, False), (0.18, True)])
def test_the_nearest_size_reaches_the_goal(
    model: Path, given_samples: tuple[Samples, Samples], tmp_path: Path, size: float, is_enough: bool
) -> None:
    report = run(model, given_samples[0], tmp_path / "q.onnx", max_size=size, min_sqnr=0)
    assert (report.agreement.worst_sqnr >= 33) is is_enough


LOST = """
from pathlib import Path
import numpy as np
wanted = np.load(Path(__file__).with_name("answers.npy"))
def minus_nsr(outputs, samples):
    found = np.concatenate([one["y"] for one in outputs])
    return -np.square(found - wanted[: len(found)]).sum() / np.square(wanted[: len(found)]).sum()
"""


@pytest.fixture(scope="module")
def metrics(
    model: Path, given_samples: tuple[Samples, Samples], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Labels as the float model gives them, and a function of the error."""
    folder = tmp_path_factory.mktemp("metrics")
    answers = np.concatenate([run_session(open_session(model), one, ["y"])[0] for one in given_samples[0]])
    np.save(folder / "answers.npy", answers)
    np.save(folder / "labels.npy", answers.argmax(-1))
    (folder / "metric.py").write_text(LOST)
    return {"top1": f"top1:{folder / 'labels.npy'}", "function": f"{folder / 'metric.py'}:minus_nsr"}


@pytest.mark.parametrize("metric", ["top1", "function"])
@pytest.mark.parametrize("options", [{"max_size": 0.21}, {"prefer": "size"}])
def test_a_metric_decides_in_place_of_decibels(
    model: Path,
    given_samples: tuple[Samples, Samples],
    metrics: Mapping[str, str],
    tmp_path: Path,
    options: Mapping[str, Any],
    metric: str,
) -> None:
    report = run(model, given_samples[0], tmp_path / "q.onnx", metric=metrics[metric], max_drop=0.15, **options)
    assert report.accuracy.scores.drop <= 0.15
    assert report.size_ratio <= options.get("max_size", 0.2)
    assert min(bits_of(report.plan)) < 8


def test_aims_of_a_strict_metric_are_near_each_other(build: Build, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    weights = {f"w{place}": generator.standard_normal((128, 128)).astype(np.float32) for place in range(4)}
    products = " ".join(f"p{place} = MatMul(x, w{place})" for place in range(4))
    text = f"(float[batch, 128] x) => (float[batch, 128] y) {{ {products} y = Sum(p0, p1, p2, p3) }}"
    onnx.save(build(text, **weights), tmp_path / "model.onnx")
    samples = [{"x": generator.standard_normal((4, 128)).astype(np.float32)} for _ in range(16)]
    whole = sum(weights.values())

    def minus_nsr(outputs: Any, given: Any) -> float:
        wanted = np.concatenate([one["x"] for one in given]) @ whole
        return -float(np.square(np.concatenate([one["y"] for one in outputs]) - wanted).sum() / np.square(wanted).sum())

    options = {"prefer": "size", "metric": Metric("minus_nsr", minus_nsr), "max_drop": 5e-5}
    report = run(tmp_path / "model.onnx", samples, tmp_path / "q.onnx", **options)
    assert report.accuracy.scores.drop <= 5e-5
    assert report.size_ratio < 0.8


@pytest.mark.parametrize(
    ("options", "sentence", "first"),
    [
        ({}, r'raise max_size= or max_drop=; Goal\(prefer="size"\) finds the smallest', "--accuracy full"),
        (
            {"prefer": "size"},
            r"the smallest model found that keeps the goal .* raise max_size= to 0\.",
            "--max-size",
        ),
    ],
)
def test_a_size_in_which_the_metric_falls_too_much_is_refused(
    model: Path,
    given_samples: tuple[Samples, Samples],
    metrics: Mapping[str, str],
    tmp_path: Path,
    options: Mapping[str, Any],
    sentence: str,
    first: str,
) -> None:
    options = {**options, "max_size": 0.11, "metric": metrics["function"], "max_drop": 5e-5}
    with pytest.raises(AccuracyError, match=sentence) as caught:
        run(model, given_samples[0], tmp_path / "q.onnx", **options)
    found = [one.options for one in suggestions(caught.value.report)]
    assert found[0].startswith(first)
    assert not any(one.startswith("--exclude") for one in found)


@pytest.mark.parametrize("scheme", ["int8", "int8-storage", "nf4-block64", "mxfp4", "burn-q4s"])
def test_schemes_of_other_formats_are_refused(model: Path, tmp_path: Path, scheme: str) -> None:
    with pytest.raises(SchemeError, match=f"scheme {scheme} has other formats, expected a weight-only scheme"):
        quantize(model, None, tmp_path / "q.onnx", scheme=scheme, goal=Goal(max_size=0.3), budget=QUICK)


@pytest.mark.parametrize("large", [False, True])
def test_weights_beside_the_model_are_measured_too(
    model: Path, given_samples: tuple[Samples, Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    # The prepared model links to such a file, and onnxruntime reads no links in a body.
    monkeypatch.setattr("onnxq.ir.stored_tensors._LARGE_BYTES", 1 << (10 if large else 30))
    (tmp_path / "given").mkdir()
    save(load(model), tmp_path / "given" / "model.onnx", external_data=True)
    report = run(tmp_path / "given" / "model.onnx", given_samples[0], tmp_path / "q.onnx", max_size=0.21)
    assert report.run.failures == ()
    strong, weak = bits_of(report.plan)
    assert strong > weak
