"""What is asked of a quantization, and the budget."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from onnxq.calibration.calibrate import Collection
from onnxq.config.effort import EFFORTS, FULL
from onnxq.config.presets import PRESETS
from onnxq.errors import SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.lowering import AllowedOps
from onnxq.pipeline import plan
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.steps.request import Budget, QuantizationRequest


def test_a_plan_brings_its_own_target_and_emit(residual) -> None:
    made = replace(plan(residual, target="tensorrt"), emit=AllowedOps.ORT)
    wanted = QuantizationRequest.of(made, DEFAULT_TARGET, ())
    assert (wanted.target, wanted.replay, wanted.scheme.emit) == ("tensorrt", made, AllowedOps.ORT)


@pytest.mark.parametrize(
    ("asked", "target", "measured", "written"),
    [
        (AllowedOps.FASTEST, DEFAULT_TARGET, True, AllowedOps.FASTEST),
        (AllowedOps.FASTEST, DEFAULT_TARGET, False, AllowedOps.QDQ),
        (AllowedOps.FASTEST, "openvino", True, AllowedOps.QDQ),
        (AllowedOps.QDQ, DEFAULT_TARGET, True, AllowedOps.QDQ),
        (AllowedOps.STRICT, "tensorrt", True, AllowedOps.STRICT),
        (AllowedOps.ORT, "onnxruntime-cpu-arm", False, AllowedOps.ORT),
    ],
)
def test_operators_of_the_runtimes_own_are_written_where_they_are_measured_or_asked_for(
    asked: AllowedOps, target: str, measured: bool, written: AllowedOps
) -> None:
    wanted = QuantizationRequest.of(replace(PRESETS["int8"], emit=asked), target, ())
    assert wanted.emit(measured=measured) is written


def test_a_plan_is_carried_out_with_the_operators_that_it_was_made_with(residual) -> None:
    made = replace(plan(residual), emit=AllowedOps.FASTEST)
    assert QuantizationRequest.of(made, DEFAULT_TARGET, ()).emit(measured=False) is AllowedOps.FASTEST


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "qnn"])
def test_no_other_target_is_given_operators_of_onnxruntimes_own(target: str) -> None:
    wanted = QuantizationRequest.of(replace(PRESETS["int8"], emit=AllowedOps.ORT), target, ())
    with pytest.raises(SchemeError, match=f"only onnxruntime has, and the target is {target}; leave it out"):
        wanted.emit(measured=True)


def test_names_are_looked_up_at_the_door() -> None:
    assert QuantizationRequest.of("int8-storage", DEFAULT_TARGET, ()).scheme is PRESETS["int8-storage"]
    with pytest.raises(SchemeError, match="did you mean 'tensorrt'"):
        QuantizationRequest.of("int8", "tensort", ())


@pytest.mark.parametrize("name", list(EFFORTS))
def test_a_name_stands_for_that_effort_in_search_and_accuracy(name: str) -> None:
    budget = Budget.of(name)
    assert (budget.search, budget.accuracy, budget.effort) == (name, name, EFFORTS[name])
    assert Budget.of(budget) is budget


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        (Budget(time_limit=1.5), "1.5 s with --time-limit"),
        (Budget(max_candidates=3), "3 models with --max-candidates"),
        (Budget(time_limit=60, max_candidates=3), "60 s with --time-limit and 3 models with --max-candidates"),
    ],
)
def test_what_ends_a_search_is_told_with_the_option_that_gives_more(budget: Budget, limit: str) -> None:
    assert budget.limit == limit


def test_methods_may_be_given_instead_of_an_effort() -> None:
    assert Budget(accuracy="gptq").tried.methods == ("gptq",)
    assert Budget(accuracy=FULL).tried is FULL


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"latency_seconds": math.nan},
            "the time for latency in seconds is nan, expected a finite number that is not negative",
        ),
        ({"latency_seconds": -1}, "the time for latency in seconds is -1, expected"),
        ({"latency_seconds": "2"}, "the time for latency in seconds is '2' of type str, expected a number"),
        ({"search": "ful"}, "search 'ful' is not one of off, fast, full; did you mean 'full'"),
        ({"accuracy": "biases"}, "accuracy 'biases' is not one of"),
        ({"time_limit": 0}, "the time limit in seconds is 0, expected more than 0; leave it out to have no limit"),
        ({"time_limit": math.nan}, "the time limit in seconds is nan, expected more than 0"),
        ({"max_candidates": -1}, "the number of candidates is -1, expected more than 0"),
        ({"layers": -1}, "the number of samples for layers is -1, expected 0 or more"),
        ({"threads": 0}, "the number of threads is 0, expected more than 0"),
        ({"threads": 1.5}, "the number of threads is 1.5 of type float, expected a whole number"),
        ({"profile_cache": 3}, "the file of node times is 3 of type int, expected a path"),
    ],
)
def test_what_says_nothing_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        Budget(**given)  # type: ignore[arg-type]


def test_what_is_smallest_is_found_by_a_search_alone() -> None:
    Budget().check(Goal(prefer="size"))
    Budget("off").check(Goal())
    with pytest.raises(SchemeError, match="a search finds what is smallest, and it is off"):
        Budget("off").check(Goal(prefer="size"))


def test_a_search_ends_with_the_time_there_is_for_all_or_with_so_many_measurements() -> None:
    effort = Budget(time_limit=5.0, max_candidates=3).effort
    assert effort is not None
    assert (effort.seconds, effort.measurements) == (5.0, 3)
    assert Budget("off", time_limit=5.0).effort is None


def test_statistics_of_a_file_can_be_left_out(tmp_path: Path) -> None:
    assert Budget().without_statistics() == Budget()
    kept = Collection(workers=2, reuse=tmp_path / "s.json", checkpoint=tmp_path / "s.json")
    found = Budget(collection=kept).without_statistics().collection
    assert found is not None
    assert (found.workers, found.reuse, found.checkpoint) == (2, None, None)
