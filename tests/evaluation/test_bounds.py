"""Confidence bounds of the SQNR and of labels."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MODELS
from hypothesis import given
from hypothesis import strategies as st

from onnxq.evaluation.bounds import (
    alpha_spending,
    decibels_of_labels,
    effective_sample_size,
    highest_mean,
    lower_bound,
    of_files,
    share_at,
    spread_of_parts,
)
from onnxq.runtime.sessions import open_session, run

# The benchmark prints the whole table; here are fewer draws, of which a share of 92 % is known to 2 %.
BENCHMARK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "coverage_of_bounds.py"))
DRAWN = 500


@pytest.mark.parametrize("count", [4, 32])
@pytest.mark.parametrize("scenario", BENCHMARK["SCENARIOS"])
def test_bounds_hold_in_92_to_99_percent(scenario: str, count: int) -> None:
    draw = BENCHMARK["SCENARIOS"][scenario]
    held, slack = BENCHMARK["coverage"](draw, count, DRAWN, BENCHMARK["truth"](draw, 100_000))
    assert 0.90 <= held <= 0.997
    assert 0 < slack < 20 / math.sqrt(count)


@pytest.mark.parametrize(
    ("kind", "count", "least", "slack"),
    [
        # Without errors that meet the answers of other samples, 85 % hold.
        ("softmax", 16, 0.93, 6.0),
        # Three sure answers show nothing of an unsure one: 69 % hold with what was measured alone.
        ("one sigmoid score", 3, 0.88, 30.0),
        ("scores of anchors", 3, 0.90, 12.0),
        ("TopK of scores", 8, 0.92, 8.0),
        # As probabilities, their zeros cost 9 dB.
        ("sparse rows", 16, 0.91, 5.0),
        # If each label counts by itself, 89 % hold.
        ("labels", 16, 0.93, 4.0),
    ],
)
def test_bounds_hold_for_each_kind_of_output(kind: str, count: int, least: float, slack: float) -> None:
    held, below = BENCHMARK["coverage_of_kind"](BENCHMARK["KINDS"][kind], count, 200, 2000)
    assert held >= least
    assert 0 < below < slack


def test_normal_noise_is_trusted_nearly_as_it_is() -> None:
    draw = BENCHMARK["SCENARIOS"]["normal, 64 numbers a sample"]
    slacks = [BENCHMARK["coverage"](draw, count, DRAWN, 0.0)[1] for count in (4, 8, 16, 32)]
    assert slacks == sorted(slacks, reverse=True)
    assert slacks[-1] < 0.6


def test_special_cases_of_bounds() -> None:
    audible, silent = (1e6, 1.0), (0.0, 1.0)
    assert 58 < lower_bound([audible] * 15 + [silent]) < 60
    assert lower_bound([silent] * 16) == -math.inf
    assert lower_bound([(1.0, 0.0)] * 3) == math.inf
    more = [lower_bound([(100.0, 1.0)] * count) for count in (1, 2, 4, 8, 16)]
    assert more == sorted(more)
    assert 12 < more[0] < 14
    assert 19.9 < more[-1] < 20
    energies = [(100.0, noise) for noise in (1.0, 2.0, 0.5, 1.5)]
    looks = [lower_bound(energies, alpha_spending(number)) for number in (3, 2, 1)]
    assert looks == sorted(looks)
    assert looks[0] < looks[-1]


@given(
    st.lists(st.tuples(st.just(0.0) | st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)), min_size=1, max_size=12),
    st.sampled_from([2.0**-40, 2.0**40]),
)
def test_bounds_are_below_what_was_seen_whatever_the_order_and_the_unit(
    energies: list[tuple[float, float]], unit: float
) -> None:
    signal, noise = (math.fsum(column) for column in zip(*energies, strict=True))
    found = lower_bound(energies)
    if not signal:
        assert found == -math.inf
        return
    assert found < 10 * math.log10(signal / noise)
    assert lower_bound(energies[::-1]) == pytest.approx(found)
    assert lower_bound([(unit * one, unit * other) for one, other in energies]) == pytest.approx(found)


def test_the_worst_of_several_outputs_holds_without_an_allowance() -> None:
    generator = np.random.default_rng(0)
    held = []
    for _ in range(400):
        noises = generator.chisquare(8, (8, 5)) / 8 * [1.0, 1.0, 0.9, 0.5, 0.1]
        held.append(min(lower_bound([(1.0, noise) for noise in column]) for column in noises.T) <= 0.0)
    assert np.mean(held) >= 0.95


@pytest.mark.parametrize("count", [8, 256])
@pytest.mark.parametrize(("lost", "won"), [(0.3, 0.05), (0.1, 0.1), (0.02, 0.01), (0.005, 0.0)])
def test_bounds_of_answers_that_turn_over_hold(count: int, lost: float, won: float) -> None:
    generator = np.random.default_rng(count)
    answers = generator.choice([1.0, -1.0, 0.0], (2 * DRAWN, count), p=[lost, won, 1 - lost - won])
    held = np.mean([highest_mean(one, 1.0) >= lost - won for one in answers])
    assert held >= 0.92


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20), st.floats(0.1, 10))
def test_bounds_of_means_are_above_what_was_seen_and_more_so_when_more_were_tried(
    values: list[float], worst: float
) -> None:
    bounds = [highest_mean(np.array(values), worst, alpha_spending(number)) for number in (1, 2, 5)]
    assert np.mean(values) <= bounds[0] + 1e-9
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("tried", [1, 5])
def test_the_first_of_several_candidates_that_pass_is_trusted_rightly(tried: int) -> None:
    generator = np.random.default_rng(tried)
    wrong = 0
    for _ in range(DRAWN):
        # All are as noisy as what is not allowed; those that pass, pass by luck.
        noises = generator.lognormal(0.0, 1.0, (tried, 16)) / math.exp(0.5)
        bounds = [lower_bound([(1.0, one) for one in row], alpha_spending(look)) for look, row in enumerate(noises, 1)]
        wrong += max(bounds) > 0.0
    assert wrong / DRAWN <= 0.08


def of_parts(generator: np.random.Generator, count: int, rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Draw outputs of samples that differ in noise by as much as their neighbouring rows do, and what is found."""
    between = generator.lognormal(0, 0.5, (count, 1, 1))
    within = np.repeat(generator.lognormal(0, 0.5, (count, 8, 1)), rows // 8, axis=1)
    expected = generator.normal(0, 1, (count, rows, 8))
    return expected, expected + 0.1 * np.sqrt(between * within) * generator.normal(0, 1, expected.shape)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_of_few_samples_tell_how_samples_differ(count: int) -> None:
    generator = np.random.default_rng(count)
    true = -10 * math.log10(0.01 * math.exp(0.25))
    reported, untold = [], []
    for _ in range(DRAWN):
        expected, found = of_parts(generator, count)
        energies = [(float((x**2).sum()), float(((y - x) ** 2).sum())) for x, y in zip(expected, found, strict=True)]
        spreads = [spread_of_parts(*pair) for pair in zip(expected, found, strict=True)]
        reported.append(lower_bound(energies, spreads=spreads))
        untold.append(lower_bound(energies))
    assert np.mean(np.array(reported) <= true) >= 0.92
    # A single sample is trusted with more than without parts, and few that are alike by chance with less.
    assert (np.median(reported) > np.median(untold)) == (count == 1)


def alike_within_files(
    generator: np.random.Generator, files: int, between: float, within: float
) -> tuple[list[tuple[float, float]], list[str]]:
    """Draw the energies of 4 to 32 rows of each file, whose noise differs between files and within them."""
    rows = generator.integers(4, 33, files)
    names = np.repeat(np.arange(files), rows)
    signal = generator.lognormal(0, 0.3, len(names))
    noise = signal * generator.lognormal(0, between, files)[names] * generator.lognormal(0, within, len(names))
    return list(zip(signal.tolist(), noise.tolist(), strict=True)), names.astype(str).tolist()


@pytest.mark.parametrize("files", [8, 32])
@pytest.mark.parametrize(("between", "within"), [(1.0, 1.0), (0.7, 0.2)])
def test_bounds_of_files_hold_and_those_of_their_rows_do_not(files: int, between: float, within: float) -> None:
    generator = np.random.default_rng(files)
    true = -10 * math.log10(math.exp((between**2 + within**2) / 2))
    of_rows, found = [], []
    for _ in range(DRAWN):
        energies, names = alike_within_files(generator, files, between, within)
        of_rows.append(lower_bound(energies) <= true)
        found.append(lower_bound(of_files(energies, names)) <= true)
    assert 0.90 <= np.mean(found) <= 0.99
    assert np.mean(of_rows) < 0.85

    alone = [(1.0, noise) for noise in (0.1, 0.25, 0.3)]
    assert of_files(alone, ()) == of_files(alone, ["", "", ""]) == of_files(alone, ["a", "b", "c"]) == alone


def test_parts_are_told_of_outputs_with_rows_enough_that_are_finite_and_noisy() -> None:
    one = np.ones((16, 4))
    uneven = one + np.repeat([0.1, 0.3], 8)[:, None]
    assert spread_of_parts(one, uneven) == pytest.approx(0.8 * math.sqrt(8 / 7))
    assert spread_of_parts(3 * one, 3 * uneven) == pytest.approx(spread_of_parts(one, uneven))
    # What is as noisy for its signal everywhere has parts that are alike.
    assert spread_of_parts(uneven, 1.1 * uneven) == pytest.approx(0, abs=1e-9)
    for expected, found in ((one[:15], uneven[:15]), (one, one), (one, one * np.nan), (one.ravel(), uneven.ravel())):
        assert spread_of_parts(expected, found) is None


# Labels that differ in decibels of scores.


@pytest.mark.parametrize(("seen", "least"), [(2, 0.355), (3, 0.818), (5, 1.970), (10, 5.425), (50, 38.965)])
def test_the_share_counts_that_can_be_told_from_chance(seen: int, least: float) -> None:
    """The exact lower bounds of a Poisson variable are half the 5 % quantiles of chi squared, as tables have them."""
    assert share_at(decibels_of_labels(seen, 10_000)) * 10_000 == pytest.approx(least, abs=0.03)


@pytest.mark.parametrize("name", ["gru", "resnet"])
def test_noise_on_the_scores_of_trained_models_makes_about_as_many_labels_differ(name: str) -> None:
    session = open_session(MODELS / f"{name}.onnx")
    images = np.load(MODELS / "data" / "test.npz")["image"][:400]
    scores = np.concatenate([run(session, {"image": image[None]})[0] for image in images]).astype(np.float64)
    noise = np.random.default_rng(0).normal(size=(5, *scores.shape))
    noise *= np.sqrt(np.square(scores).mean() / np.square(noise).mean())
    for decibels in (20, 30, 40):
        share = np.mean(scores.argmax(-1) != (scores + noise * 10 ** (-decibels / 20)).argmax(-1))
        assert share_at(decibels) / 2 < share < 2 * share_at(decibels)


@pytest.mark.parametrize("files", [8, 32])
@pytest.mark.parametrize(("share", "alike"), [(0.02, 0.3), (0.05, 0.8), (0.3, 0.2)])
def test_what_differs_in_the_rows_of_files_is_told_from_chance_by_files(files: int, share: float, alike: float) -> None:
    """Labels of a file differ together: their chance of it is drawn by file, with so high a correlation of its rows."""
    generator = np.random.default_rng(files)
    held, of_rows = [], []
    for _ in range(DRAWN):
        rows = generator.integers(4, 33, files)
        chances = generator.beta(share * (1 / alike - 1), (1 - share) * (1 / alike - 1), files)
        differ, names = generator.binomial(1, np.repeat(chances, rows)), np.repeat(np.arange(files), rows).astype(str)
        counted = effective_sample_size(differ.tolist(), [1] * len(differ), names.tolist())
        seen = int(differ.sum()), len(differ)
        held.append(share_at(decibels_of_labels(*seen, counted)) <= share)
        of_rows.append(share_at(decibels_of_labels(*seen)) <= share)
    assert 0.92 <= np.mean(held) <= 0.99
    assert np.mean(of_rows) < 0.9


@pytest.mark.parametrize(
    ("differing", "counted"), [([1, 0, 0, 0], 1.0), ([4, 0, 0, 0], 1.0), ([2, 2, 2, 2], 8.0), ([0, 0, 0, 0], 0.0)]
)
def test_those_that_differ_count_between_one_and_all(differing: list[int], counted: float) -> None:
    assert effective_sample_size(differing, [4] * 4, ["a", "b", "c", "d"]) == counted

    # Many that differ in one file alone are not taken for none.
    assert decibels_of_labels(1, 400, 1.0) == decibels_of_labels(1, 400)
    assert decibels_of_labels(50, 400) < 1 < decibels_of_labels(50, 400, 1.0) < 30
