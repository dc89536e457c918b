"""The fastest plan that is accurate enough: that of the scheme, or what a minimum cut of time and error makes of it.

1. The plan of the scheme, with ranges from minimum to maximum. If it misses the aim, more accurate encodings of it.
2. The float model, this plan's and one for each other way to run nodes are profiled: the time of each node and border.
3. The plan of least time, an exact minimum cut. If it is accurate, it is a candidate.
4. Otherwise the error of each quantizer is measured in one session, and time plus price times error is minimised. The
   lowest price that reaches the aim is found by bisection; between it and the next one, the nodes of highest error stay
   in float.
5. The fastest few that are accurate run beside the float model, and the scheme's own if it is accurate, which wins
   unless another is clearly faster.
6. The model is judged on the holdout. On a miss the aim rises once by what was lacking.
7. If no integers are accurate and fast enough, weights are only stored, with more bits where the goal needs them.

One deadline ends all of it: in an accurate plan found so far, else in the scheme or the most accurate plan if these
reach the goal, else in stored weights.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np

from onnxq.calibration.provenance import sample_digest, structure_digest
from onnxq.config.effort import AccuracyEffort, Effort
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import evenly
from onnxq.errors import EngineError
from onnxq.evaluation.goal import HIGHEST_AIM, Goal, aim_of, lacking_bound
from onnxq.evaluation.latency import ENOUGH, NOT_SLOWER, measure_latencies
from onnxq.evaluation.outputs import counts_elements
from onnxq.evaluation.verification import COMPARED_SAMPLES, Verification, Verifier
from onnxq.ir import all_graphs
from onnxq.numerics.affine import ratio_of_sqnr, sqnr_of_ratio
from onnxq.planning.plan import Demotion, Plan, stored_instead
from onnxq.runtime.engine import Engine, OnnxRuntime
from onnxq.search.accuracy_methods import improved, replayed, with_requested_gptq
from onnxq.search.bit_allocation import (
    CERTIFICATE_BYTES,
    SAME_SIZE,
    Allocation,
    FormatFrontier,
    Nodes,
    WeightFormat,
    plan_of,
    weight_formats,
    with_measured,
)
from onnxq.search.candidate import Candidate, Recipe, Workshop, multiplies_integers
from onnxq.search.costs import Choice, Costs, Offer, offers_of
from onnxq.search.kernel_times import UNTIMED, NodeTimes, find_regions, node_times, trace_kernels
from onnxq.search.results import MethodGain, NodeSensitivity, Point, SearchResult, SizePoint, Trail
from onnxq.search.sensitivity import SILENT, Sensitivities, by_kind_of_layer, measure_sensitivities
from onnxq.search.times import MeasuredTimes, times_key
from onnxq.system.failures import tolerate
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.resources import NEVER, Deadline, cached_by_mtime

_LOG = logging.getLogger(__name__)

# Decibels above the goal that plans aim at without a holdout, because the samples that chose them also judge them.
_NO_HOLDOUT_DB = 4.0
# A metric falls as the error rises, so the lowest SQNR is tried first; bits of weights reach more than integers do.
_METRIC_AIMS_DB = (8.0, 11.0, 14.0, 17.0, 20.0, 23.0, 26.0, 30.0, 35.0, 40.0)
_BITS_AIMS_DB = (*_METRIC_AIMS_DB, 45.0, 50.0, 55.0)
# Decibels above the last aim of a metric at which stored weights are aimed, as integers at that aim were not enough.
_STORED_MARGIN_DB = 20.0
# Looks at the holdout before weights are only stored; each look at it weakens its bound.
_LOOKS = 2
# A plan has to be this many times as fast as that of the scheme: runs of one model differ by as much.
_CLEARLY = 1.03
# Prices of error: at the first, the allowed error costs a hundredth of a run; at the last, nothing else counts.
_FIRST_PRICE, _PRICE_STEP, _PRICES = 0.01, math.sqrt(2), 48
# Weights may take more bits up to the first of these shares of the file, and up to the next only if the aim cannot be
# reached within it.
_MORE_BYTES = (0.05, 0.2, math.inf)
# Seconds of a profile, the fewest runs that have a median, and the most, as short runs differ little.
_PROFILED_SECONDS, _FEWEST_RUNS, _MOST_RUNS = 0.2, 4, 30
# Other ways to run nodes are not worth a model if the nodes take a smaller share of a run.
_LEAST_SHARE = 0.05
# Samples that models are timed on, seconds for each model in a race, and how often all are loaded anew, as loads of one
# model differ in speed.
_TIMED_SAMPLES, _RACE_SECONDS, _ROUNDS = 4, 0.5, 3
# Plans whose weights are measured one by one: that of the scheme, and those that seem best by what is known.
_MEASURED_PLANS = 3
# Models that are built until a file fits; each tells what nodes add to the bytes of weights.
_MOST_FITS = 3
# Runs for each sample that measure the layers of a large model in groups; each takes seconds.
_LARGE_RUNS = 3
# Part of the time for more accurate encodings; the search needs the other one.
_ENCODING_PART = 1 / 2
# Seconds to build, load and check the last model.
_BUILD_SECONDS = 2.0
_STORED = "the integer model is not accurate and fast enough"
# Each key holds the digest of the model as it was given, too.
_structure = cached_by_mtime(structure_digest)


@dataclass(frozen=True, eq=False)
class Search:
    """What a search is given.

    Attributes:
        workshop: builds models and compares them on the search samples.
        samples: that the model was calibrated by.
        recipe: how values are encoded to begin with.
        verifier: judges models on the holdout.
        reference: file of the float model as it was given.
        goal: the accuracy, metric or size to reach.
        effort: how much is measured; None only applies the scheme.
        accuracy: the methods that may make encodings more accurate.
        times: what was measured before on this machine.
        deadline: of the whole run.
        judging: seconds of each look at the holdout so far; they do not count against the effort.
    """

    workshop: Workshop
    samples: SampleSource
    recipe: Recipe
    verifier: Verifier
    reference: Path
    goal: Goal
    effort: Effort | None
    accuracy: AccuracyEffort
    times: MeasuredTimes
    deadline: Deadline
    judging: list[float] = field(default_factory=list)

    # The way through

    def run(self, *, stored: bool = False) -> SearchResult:
        """Choose and judge a plan; with `stored`, only one that computes in float."""
        scheme, gains = self.first(self.workshop.model.plan({}))
        chooser = Chooser(self, scheme)
        result, sizes, late = None, tuple[SizePoint, ...](), False
        aimed, reached = self._aims[0], -math.inf
        for aim in self._aims if not stored or self.chooses_bits else ():
            result = _closed(result)
            if result is not None and self.goal.metric is None:
                # The last plan was above its aim by luck, so the next aim starts from what it reached.
                aim = min(reached + result.lacks(self.goal), HIGHEST_AIM)
            elif aim <= reached:
                continue
            chosen = None
            with tolerate("the choice of a plan"):
                if self.chooses_bits:
                    chosen, sizes = chooser.smallest(aim)
                else:
                    chosen = chooser.fastest(aim)
            late = self.is_late
            if chosen is None and late:
                chosen = chooser.best_so_far()
            if chosen is None or (result is not None and chosen.plan.effect == result.candidate.plan.effect):
                break
            result = self._judged(chosen)
            aimed, reached = aim, max(aim, chosen.bound)
            if self._is_good(result) or self._is_last(result):
                break
        if result is None or not result.keeps_up or not (self._is_good(result) or self.chooses_bits):
            # The weights of a model that was only slow need no more accuracy than it was chosen for.
            aim = aimed if result is None or self._is_good(result) else self._above(reached, result)
            result, late = self._stored(chooser, _closed(result), aim)
        return replace(result, trail=chooser.trail(result, gains, sizes, late=late))

    def applied(self) -> SearchResult:
        """Judge the plan of the scheme without a search; the bits of weights may still be chosen for a size."""
        scheme, gains = self.first(self.workshop.model.plan({}))
        chooser, chosen, sizes = Chooser(self, scheme), scheme, tuple[SizePoint, ...]()
        if self.goal.max_size is not None:
            with tolerate("the choice of bits"):
                chosen, sizes = chooser.smallest(self._aims[0])
        result = self._judged(chosen)
        return replace(result, trail=chooser.trail(result, gains, sizes, late=self.is_late))

    def replayed(self, plan: Plan) -> SearchResult:
        """Judge a plan as it is."""
        candidate = self.workshop.built(plan, replayed(self.workshop, plan, self.samples))
        return self._judged(candidate)

    def first(self, plan: Plan) -> tuple[Candidate, tuple[MethodGain, ...]]:
        """Return the candidate of the scheme, more accurately encoded if it misses the aim."""
        recipe = with_requested_gptq(self.workshop, plan, self.recipe, self.samples)
        if not self.compares:
            return self.workshop.built(plan, recipe), ()
        first = self.workshop.measured(plan, recipe)
        _LOG.debug("scheme: %.1f dB, bound %.1f dB", first.sqnr, first.bound)
        if self.spares_methods(first) or self.is_late:
            return first, ()
        aim = self._aims[0] if self.goal.metric is None else math.inf
        return improved(self.workshop, first, self.samples, self.accuracy, aim, self.until.part(_ENCODING_PART))

    def _stored(self, chooser: Chooser, before: SearchResult | None, aim: float) -> tuple[SearchResult, bool]:
        """Judge plans that compute in float; return whether time ran out, too.

        `before` stays if the engine's own floats miss the goal.
        """
        if before is not None and before.verification.floats_miss(self.goal.min_sqnr):
            return before, self.is_late
        result, late = before, self.is_late
        # A model that was only slow said nothing of the samples that these are chosen by.
        free = int(before is not None and self._is_good(before))
        for _ in range(_LOOKS):
            candidate = chooser.stored(min(aim, HIGHEST_AIM), before)
            late = self.is_late
            if result is not None and candidate.plan.effect == result.candidate.plan.effect:
                break
            result = _closed(result)
            result = self._judged(candidate, free)
            if late or self.chooses_bits:
                break
            if self.goal.metric is not None:
                if self._is_good(result):
                    break
                aim = self._above(max(aim, candidate.bound), result)
                continue
            short = lacking_bound(result.verification.agreement, self.goal)
            lacking = max(result.lacks(self.goal), short[1] if short is not None else 0.0)
            if not lacking:
                break
            aim = max(aim, candidate.bound) + lacking
        assert result is not None
        return result, late

    def _above(self, reached: float, result: SearchResult) -> float:
        """Return the aim of stored weights after a plan that reached some decibels was not good on the holdout."""
        if self.goal.metric is not None:
            return max(reached, _METRIC_AIMS_DB[-1]) + _STORED_MARGIN_DB
        return reached + result.lacks(self.goal)

    def _is_last(self, result: SearchResult) -> bool:
        """Return whether no plan with a higher aim is tried after a result."""
        fills_size = self.goal.max_size is not None and not self.goal.prefers_size
        # Plans are tried on onnxruntime, so another choice could not see a difference of another engine.
        return fills_size or not result.keeps_up or result.verification.disputed

    def spares_methods(self, scheme: Candidate) -> bool:
        """Return whether the scheme is accurate enough to try no accuracy method."""
        tries_all = self.accuracy.thorough or self.goal.metric is not None
        return not tries_all and scheme.bound >= self._aims[0]

    # Judging

    def _judged(self, candidate: Candidate, free: int = 0) -> SearchResult:
        """Verify a candidate on the holdout; without one, each model that was tried counts as a look at the samples.

        `free` is the number of looks before this one that no choice rests on, so that they do not weaken its bound.
        """
        look = len(self.judging) + 1 - free
        looks = look if self._has_holdout else look + self.compared
        if not candidate.path.exists():
            # It was removed when it missed another aim.
            candidate = replace(candidate, path=self.workshop.built(candidate.plan, candidate.recipe).path)
        self.workshop.progress("verify", 0, 0)
        start = time.monotonic()
        verification = self.verifier.verified(candidate.path, looks)
        scores = self.verifier.scores(candidate.path, look)
        self.judging.append(time.monotonic() - start)
        return SearchResult(candidate, verification, scores, self._keeps_up(candidate, verification))

    @property
    def compared(self) -> int:
        """Number of candidates that the search samples chose among; without a search a single one is no choice."""
        return len(self.workshop.tried) - (self.effort is None and len(self.workshop.tried) == 1)

    def _keeps_up(self, candidate: Candidate, verification: Verification) -> bool:
        """Return whether a model is not slower than float, by this timing or by a clear one before it.

        A clear "not slower" of an earlier run stays valid unless this one is clearly slower.
        """
        if verification.latency is None or not self.is_timed:
            # The time of another runtime says nothing about the target.
            return True
        speed = verification.latency.speed
        if not verification.keeps_up:
            speed = min(speed, NOT_SLOWER)
        elif verification.kernels.computes_in_float or not candidate.plan.decodes:
            # The kernels compute in float, so a lower figure is chance.
            speed = max(speed, 1.0)
        _LOG.debug("judged: %.1f dB, %.2fx", verification.agreement.worst_sqnr, speed)
        key = self.key(candidate.path, "verdict")
        if verification.latency.is_shown:
            self.times.speed(key, speed)
        clearly_slower = verification.latency.interval[1] < NOT_SLOWER
        return max(speed, self.times.speeds.get(key, 0.0)) >= 1.0 and not clearly_slower

    def _is_good(self, result: SearchResult) -> bool:
        if self.goal.metric is not None:
            return result.scores is None or result.scores.is_trusted(self.goal.max_drop)
        return not result.lacks(self.goal)

    @cached_property
    def _aims(self) -> tuple[float, ...]:
        """The SQNR in decibels to aim at, in order.

        Without a metric there are as many as looks, and a later aim is what the last plan reached and what it lacked.
        """
        if self.goal.metric is not None:
            return _BITS_AIMS_DB if self.chooses_bits else _METRIC_AIMS_DB
        aim = aim_of(self.goal.min_sqnr + (0.0 if self._has_holdout else _NO_HOLDOUT_DB))
        return (aim,) * _LOOKS

    @property
    def _has_holdout(self) -> bool:
        return self.verifier.samples is not self.samples

    @property
    def chooses_bits(self) -> bool:
        """Whether each weight gets bits of its own."""
        return self.goal.max_size is not None or self.goal.prefers_size

    # What may be measured

    @property
    def compares(self) -> bool:
        """Whether candidates are run on samples."""
        return bool(self.workshop.reference.samples)

    @property
    def is_timed(self) -> bool:
        """Whether latency is wanted, and there is an engine whose times are valid for the target."""
        return self.verifier.seconds > 0 and not self.workshop.model.is_large

    @property
    def until(self) -> Deadline:
        """When the choice has to end: by its effort, and so that the last model can be built and judged."""
        runs = 2 * min(len(self.verifier.samples), COMPARED_SAMPLES) + self.verifier.scored
        reserved = runs * self.workshop.run_seconds + self.verifier.seconds + _BUILD_SECONDS
        return Deadline(min(self.deadline.at - reserved, self._effort_ends.at + sum(self.judging)))

    @cached_property
    def _effort_ends(self) -> Deadline:
        if self.effort is None:
            return NEVER
        return Deadline.within(min(self.effort.seconds, self.effort.processes * self.workshop.process_seconds))

    @property
    def is_late(self) -> bool:
        """Whether the time of the search is over."""
        return self.until.left <= 0

    @cached_property
    def engine(self) -> Engine:
        """What times models."""
        return self.verifier.engine or OnnxRuntime()

    @cached_property
    def timed_samples(self) -> tuple[Sample, ...]:
        """The samples that models are timed on."""
        return tuple(evenly(self.workshop.reference.samples, _TIMED_SAMPLES))

    @cached_property
    def timed_as(self) -> tuple[str, ...]:
        """What times of these samples depend on: shapes, and also values where sizes or loops follow them."""
        main, *bodies = all_graphs(self.workshop.model.graph)
        follows_values = bool(bodies) or any(map(counts_elements, main.nodes))
        return tuple(map(sample_digest if follows_values else _shapes, self.timed_samples))

    def key(self, model: Path, what: str) -> str:
        """Return the key of a measurement of a model. Models that differ only in the values of weights share it."""
        beside = f"{what} beside {_structure(self.reference)}"
        return times_key(_structure(model), self.timed_as, beside, self.engine)


@dataclass(frozen=True, eq=False)
class Chooser:
    """Chooses the candidate for an aim, by costs and errors of the scheme's plan that are measured once."""

    search: Search
    scheme: Candidate

    @property
    def _workshop(self) -> Workshop:
        return self.search.workshop

    @property
    def _effort(self) -> Effort:
        assert self.search.effort is not None
        return self.search.effort

    # The fastest

    def fastest(self, aim: float) -> Candidate | None:
        """Return the fastest of the plans that reach an aim; None if none does."""
        costs, scheme = self.costs, replace(self.scheme, nanoseconds=self.costs.whole.nanoseconds)
        candidates = [scheme]
        quick = costs.best(SILENT, 0.0) if costs.has_times else costs.whole
        # The cut of least time is worth a model if it is to be clearly faster.
        if quick.nanoseconds * _CLEARLY < costs.whole.nanoseconds:
            candidates.append(self._candidate(quick, SILENT, aim))
        accurate = [candidate for candidate in candidates if candidate.bound >= aim]
        if candidates[-1].bound < aim:
            accurate += self._priced(aim)
        if not costs.has_times:
            accurate += self._uniform(aim)
        # Plans without an expected time come first.
        ranked = sorted(_distinct(accurate), key=lambda candidate: candidate.nanoseconds or 0.0)
        slow = ranked[self._effort.timed :]
        own = [candidate for candidate in slow if candidate.plan.effect == scheme.plan.effect]
        return self._raced([*ranked[: self._effort.timed - len(own)], *own], scheme)

    def _priced(self, aim: float, *, integers: bool = True) -> list[Candidate]:
        """Return plans that reach an aim, by bisection for the lowest price of error that does.

        Weights take more bits within a few percent of the file, or within more where the aim needs it.
        """
        noise, costs, accurate = self.noise, self.costs, list[Candidate]()
        for share in _MORE_BYTES:
            if accurate or self.search.is_late:
                break
            finer = costs.worth_more_bits(noise, share * self.scheme.bytes)
            best = partial(costs.best, noise, finer=finer, integers=integers)
            accurate = self._bisected(best, aim)
        return accurate

    def _bisected(self, best: partial[Choice], aim: float) -> list[Candidate]:
        allowed, total = ratio_of_sqnr(aim), self.costs.floats.total
        prices = [total / allowed * _FIRST_PRICE * _PRICE_STEP**number for number in range(_PRICES)]
        choice = cache(lambda number: best(prices[number]))
        # The first model is that of the lowest price whose expected error is the allowed one.
        number = bisect_left(range(_PRICES - 1), True, key=lambda number: choice(number).error <= allowed)
        low, high, accurate = -1, _PRICES, list[Candidate]()
        for _ in range(self._effort.tried):
            if high - low <= 1 or self.search.is_late:
                break
            candidate = self._candidate(choice(number), self.noise, aim)
            if candidate.bound >= aim:
                high = number
                accurate.append(candidate)
            elif choice(number) == choice(_PRICES - 1):
                # Nothing is more accurate.
                break
            else:
                low = number
            number = (low + high) // 2
        if accurate and low >= 0:
            accurate += self._between(best, choice(low), choice(high), prices[low], aim)
        return accurate

    def _between(
        self, best: partial[Choice], fast: Choice, slow: Choice, price: float, aim: float
    ) -> Iterator[Candidate]:
        """Yield plans that reach an aim between neighbors of the frontier, which may lie far apart, by bisection.

        Of the nodes that only the fast one has static, those of highest error are left out.
        """
        loud = self.costs.loudest(fast.static - slow.static, self.noise)
        low, high, least = 0, len(loud), slow.nanoseconds
        for _ in range(self._effort.grown):
            if high - low <= 1 or self.search.is_late:
                break
            middle = (low + high) // 2
            choice = best(price, without=frozenset(loud[:middle]))
            if choice.nanoseconds * _CLEARLY > least:
                high = middle
                continue
            candidate = self._candidate(choice, self.noise, aim)
            if candidate.bound >= aim:
                high, least = middle, choice.nanoseconds
                yield candidate
            else:
                low = middle

    def _uniform(self, aim: float) -> Iterator[Candidate]:
        """Yield accurate plans in which all possible nodes run in one other way, where nodes are not timed."""
        for offer in self.costs.offers if self.search.is_timed else ():
            if not self.search.is_late and offer.plan.effect != self.scheme.plan.effect:
                candidate = self._workshop.measured(offer.plan, self.scheme.recipe, least=aim)
                if candidate.bound >= aim:
                    yield candidate

    def _candidate(self, choice: Choice, noise: Sensitivities, aim: float) -> Candidate:
        plan = self._workshop.model.plan(self.costs.demotions(choice, noise))
        candidate = self._workshop.measured(plan, self.scheme.recipe, choice.nanoseconds, choice.error, least=aim)
        _LOG.debug("%s: %.1f dB, bound %.1f dB", choice, candidate.sqnr, candidate.bound)
        return candidate

    def best_so_far(self) -> Candidate | None:
        """Return the scheme's candidate, or else the most accurate one, if the search samples promise the goal."""
        goal = self.search.goal
        if goal.metric is not None:
            return None
        promised = [candidate for candidate in (self.scheme, *self._tried) if candidate.bound >= goal.min_sqnr]
        return max(promised, key=lambda candidate: (candidate is self.scheme, candidate.bound), default=None)

    @property
    def _tried(self) -> Iterator[Candidate]:
        """The candidates that were tried with the statistics of all samples."""
        statistics = self.scheme.recipe.statistics
        tried = self._workshop.tried.values()
        return (candidate for candidate in tried if candidate.recipe.statistics is statistics)

    # The smallest

    def smallest(self, aim: float) -> tuple[Candidate, tuple[SizePoint, ...]]:
        """Return the candidate of least error in the wanted size, or that of the smallest file that reaches an aim.

        With it, sizes that the model could have, one of which is that of the aim.
        """
        goal = self.search.goal
        most = goal.max_size if isinstance(goal.max_size, int) and not goal.prefers_size else None
        if not self._formats or (most is None and not self._compares_bits):
            return self.scheme, ()
        return self._reaching(aim) if most is None else self._within(most - CERTIFICATE_BYTES, aim)

    def _within(self, most: float, aim: float) -> tuple[Candidate, tuple[SizePoint, ...]]:
        """Return the candidate of least error whose file has at most so many bytes; the smallest one if none has."""
        scheme, overhead = self.scheme, self.scheme.bytes - self._of_scheme.bytes
        frontier = self._frontier(lambda frontier: frontier.within(most - overhead))
        tried = list[tuple[Candidate, Allocation]]()
        allocation = frontier.within(most - overhead)
        for _ in range(_MOST_FITS):
            candidate = self._with_bits(allocation)
            if math.isinf(candidate.bytes):
                # It failed.
                break
            tried.append((candidate, allocation))
            following = frontier.within(most - (candidate.bytes - allocation.bytes))
            is_smaller = following.bytes < allocation.bytes
            # A large model is not built again for the bytes that are left.
            fits = candidate.bytes <= most and (is_smaller or self._workshop.model.is_large)
            if fits or following.bytes == allocation.bytes:
                break
            allocation = following
        if not tried:
            return scheme, ()
        fitting = [pair for pair in tried if pair[0].bytes <= most] or tried
        candidate, allocation = fitting[-1]
        sizes = frontier.points(candidate.bytes - allocation.bytes, _worse(candidate, allocation), aim)
        return scheme if scheme.bytes <= most and scheme.bound > candidate.bound else candidate, sizes

    def _reaching(self, aim: float) -> tuple[Candidate, tuple[SizePoint, ...]]:
        """Return the candidate of the smallest file that reaches an aim.

        If none does, it is in float, or has the most bits if time ran out.

        Each candidate tells how much more all errors together are than expected. Where this leads nowhere, the size is
        halfway between one that is too small and one that is enough.
        """
        frontier = self._frontier(lambda frontier: frontier.reaching(ratio_of_sqnr(aim)))
        best, worse, overhead = None, 1.0, self.scheme.bytes - self._of_scheme.bytes
        low, high = frontier.within(0).bytes - 1, frontier.floats.bytes
        for _ in range(self._effort.tried):
            if high <= SAME_SIZE * low or self.search.is_late:
                break
            size = frontier.reaching(ratio_of_sqnr(aim) / worse).bytes
            size = size if low < size < high else math.isqrt(low * high)
            allocation = frontier.within(size)
            candidate = self._with_bits(allocation)
            if not math.isnan(ratio := _worse(candidate, allocation)):
                worse, overhead = ratio, candidate.bytes - allocation.bytes
            if candidate.bound >= aim:
                high, best = allocation.bytes, candidate
            else:
                low = size
        if best is None:
            best = self._with_bits(frontier.finest if self.search.is_late else frontier.floats)
        return best, frontier.points(overhead, worse, aim)

    def _with_bits(self, allocation: Allocation) -> Candidate:
        workshop, plan = self._workshop, plan_of(self._workshop.model, allocation)
        return (workshop.measured if self._compares_bits else workshop.built)(plan, self.scheme.recipe)

    def _frontier(self, choose: Callable[[FormatFrontier], Allocation]) -> FormatFrontier:
        """Return the formats of weights, with the measured errors of those of the scheme and of those chosen then."""
        measured: dict[Nodes, dict[QuantSpec, float]] = defaultdict(dict)
        model, allocation = self._workshop.model, self._of_scheme
        frontier = FormatFrontier.of(self._formats)
        for _ in range(_MEASURED_PLANS if self._compares_bits else 0):
            new = {
                nodes: format.spec
                for nodes, format in allocation.formats.items()
                if format.spec is not None and format.spec not in measured[nodes]
            }
            if not new:
                break
            names = frozenset(chain.from_iterable(new))
            errors = self._sensitivities(plan_of(model, allocation), names, len(names)).nodes
            for nodes, spec in new.items():
                measured[nodes][spec] = sum(errors.get(node, 0.0) for node in nodes)
            frontier = FormatFrontier.of(with_measured(self._formats, measured))
            allocation = choose(frontier)
        return frontier

    @cached_property
    def _formats(self) -> Mapping[Nodes, Sequence[WeightFormat]]:
        """The formats of each weight, with the error of the weights alone."""
        return weight_formats(self._workshop.model)

    @cached_property
    def _of_scheme(self) -> Allocation:
        """The formats of the scheme; float stands for a format that is not among those of a weight."""
        decisions = self.scheme.plan.by_node

        def own(nodes: Nodes) -> WeightFormat:
            spec, formats = decisions[nodes[0]].weights[0].spec, self._formats[nodes]
            return next((format for format in formats if format.spec == spec), formats[-1])

        return Allocation({nodes: own(nodes) for nodes in self._formats})

    @property
    def _compares_bits(self) -> bool:
        return self.search.compares and self.search.effort is not None and not self.search.is_late

    # Weights that are only stored

    def stored(self, aim: float, before: SearchResult | None) -> Candidate:
        """Return a candidate that computes in float.

        It has the weights of the result before it, if these are accurate enough so, or those of the scheme, some with
        more bits if they need them.
        """
        why, plans = _STORED, list[Plan]()
        if before is not None:
            why = _slower(before) if not before.keeps_up else _STORED
            plans.append(self._as_stored(before.candidate.plan, why))
        plans.append(self._workshop.model.plan(stored_instead(self.scheme.plan, why)))
        recipe = self.scheme.recipe
        if not self.search.compares or (before is not None and self.search.chooses_bits):
            return self._workshop.built(plans[0], recipe)
        for plan in plans:
            candidate = self._workshop.measured(plan, recipe)
            if candidate.bound >= aim:
                return candidate
        # No weight gets more bits because time ran out.
        if not self.search.is_late:
            with tolerate("weights of more bits"):
                if accurate := self._priced(aim, integers=False):
                    return min(accurate, key=lambda candidate: candidate.bytes)
        in_float = [candidate for candidate in self._tried if not candidate.plan.decodes]
        return max(in_float, key=lambda candidate: candidate.bound)

    def _as_stored(self, plan: Plan, why: str) -> Plan:
        """Return the plan with the same weights, dequantized at load."""
        demotions = {}
        for decision in plan.decisions:
            if decision.weights and decision.mode is not Mode.FLOAT:
                weight = decision.weights[0].spec
                demotions[decision.node] = Demotion(Mode.STORAGE, why, weight=weight, finer=decision.finer)
            elif self.scheme.plan.by_node[decision.node].weights:
                # Quantization was too coarse for this node.
                why_float = decision.reason, decision.figures
                demotions[decision.node] = Demotion(Mode.FLOAT, *why_float, finer=decision.finer)
        return self._workshop.model.plan(demotions)

    # Measurements

    @cached_property
    def costs(self) -> Costs:
        """The costs of nodes: by profiles, or by their weights where no times are valid."""
        search, model, plan = self.search, self._workshop.model, self.scheme.plan
        # Each offer for a large model would be another model with all weights.
        offers = () if model.is_large else tuple(offers_of(model, plan))
        if not search.is_timed or search.is_late or not search.engine.profiles:
            return Costs.of(model, plan, None, offers)
        progress = self._workshop.progress
        progress("profile", 0, 3)
        floats = self.times(None)
        progress("profile", 1, 3)
        scheme = self.times(self.scheme)
        if not floats.nodes or not scheme.nodes:
            # A run makes too many events for a profile, as long loops do.
            return Costs.of(model, plan, None, offers)
        progress("profile", 2, 3)
        timed = tuple(self._timed_offers(offers, floats))
        progress("profile", 3, 3)
        return Costs.of(model, plan, (floats, scheme), timed)

    def _timed_offers(self, offers: Iterable[Offer], floats: NodeTimes) -> Iterator[Offer]:
        """Yield the offers with their times, whose nodes take enough of a run to be worth a model."""
        for offer in offers:
            taken = sum(floats.nodes.get(node, 0.0) for node in offer.nodes)
            is_small = taken <= _LEAST_SHARE * floats.total
            if is_small or self.search.is_late or offer.plan.effect == self.scheme.plan.effect:
                continue
            times = UNTIMED
            with tolerate("the profile of other ways to run nodes"):
                times = self.times(self._workshop.measured(offer.plan, self.scheme.recipe))
            if times.nodes:
                yield replace(offer, times=times)

    def times(self, candidate: Candidate | None) -> NodeTimes:
        """Return the times of a candidate's nodes, known or measured now; None stands for the float model."""
        search, model = self.search, self._workshop.model
        path, quantized = model.prepared, dict[str, str]()
        if candidate is not None:
            path, quantized = candidate.path, dict(candidate.quantized)

        def measured() -> NodeTimes:
            samples = tuple(dict(zip(search.timed_as, search.timed_samples, strict=True)).values())
            runs = min(max(round(_PROFILED_SECONDS / self._workshop.run_seconds), _FEWEST_RUNS), _MOST_RUNS)
            with wrap_plugin_errors(f"engine {search.engine.name!r}", EngineError):
                kernels = search.engine.profile(path, samples, model.prepared.parent, math.ceil(runs / len(samples)))
            return trace_kernels(kernels, model.graph, quantized)

        return search.times.of_nodes(search.key(path, "nodes"), measured)

    @cached_property
    def noise(self) -> Sensitivities:
        """The errors of the scheme's quantizers, and of the nodes in each offer that are faster in it than in float."""
        floats = self.costs.floats.nodes
        return self.noise_of(lambda name, time: time < floats.get(name, 0.0))

    def noise_of(self, counts: Callable[[str, float], bool]) -> Sensitivities:
        """Measure the errors of the scheme's quantizers, and of the nodes in offers that count by their times there."""
        model, costs, decisions = self._workshop.model, self.costs, self.scheme.plan.decisions
        nodes_of = [
            (offer, {name for name in offer.nodes if counts(name, costs.offered[offer.mode][name])})
            for offer in costs.offers
        ]
        worthwhile = [(offer, nodes) for offer, nodes in nodes_of if nodes]
        runs = self._runs // (1 + len(worthwhile))
        # Dynamic nodes can always have stored weights instead.
        stored = {
            decision.node: Demotion(Mode.STORAGE, _STORED) for decision in decisions if decision.mode is Mode.DYNAMIC
        }
        scheme = self._sensitivities(model.plan(stored), None, runs)
        modes = {offer.mode: self._sensitivities(offer.plan, nodes, runs).nodes for offer, nodes in worthwhile}
        return replace(scheme, modes=modes)

    def _sensitivities(self, plan: Plan, nodes: Set[str] | None, runs: int) -> Sensitivities:
        workshop = self._workshop
        board = workshop.switched(plan, self.scheme.recipe, nodes)
        order = by_kind_of_layer(workshop.model.graph) if workshop.model.is_large else None
        progress = partial(workshop.progress, "sensitivity")
        return measure_sensitivities(board, runs, order=order, until=self.search.until, progress=progress)

    @property
    def _runs(self) -> int:
        """Runs to measure errors by, a power of two, so that they rarely change with the speed of the machine."""
        workshop = self._workshop
        if workshop.model.is_large:
            return _LARGE_RUNS * len(workshop.reference.samples)
        timed = self.costs.floats.total / 1e9 if self.costs.has_times else 0.0
        process = workshop.process_seconds
        return 1 << round(math.log2(max(self._effort.sensitivity * process / (timed or workshop.run_seconds), 1.0)))

    def _raced(self, ranked: Sequence[Candidate], scheme: Candidate) -> Candidate | None:
        """Return the fastest of a few candidates, timed beside the float model; None if there are none."""
        search = self.search
        if len(ranked) < 2 or not search.is_timed or search.is_late:
            return next(iter(ranked), None)
        keys = [search.key(candidate.path, "speed") for candidate in ranked]
        if not all(key in search.times.speeds for key in keys):
            with tolerate("timing models that were tried"):
                latencies = measure_latencies(
                    (search.reference, *(candidate.path for candidate in ranked)),
                    search.timed_samples,
                    seconds=min(_RACE_SECONDS, search.verifier.seconds) * len(ranked),
                    rounds=_ROUNDS,
                    enough=ENOUGH,
                    engine=search.engine,
                )
                for key, latency in zip(keys, latencies, strict=True):
                    search.times.speed(key, latency.speed)
        speeds = map(search.times.speeds.get, keys)
        timed = [replace(candidate, speed=speed) for candidate, speed in zip(ranked, speeds, strict=True)]
        _LOG.debug("speeds: %s", [candidate.speed for candidate in timed])
        self._workshop.tried.update({candidate.key: candidate for candidate in timed})
        most = max(candidate.speed or 0.0 for candidate in timed)
        alike = [candidate for candidate in timed if (candidate.speed or 0.0) * _CLEARLY >= most]
        own = next((candidate for candidate in alike if candidate.plan.effect == scheme.plan.effect), None)
        # Of equally fast plans that of the scheme is the simplest, and then the most accurate one is worth most.
        return own or max(alike, key=lambda candidate: candidate.bound)

    # What a report tells

    def trail(
        self,
        result: SearchResult,
        gains: tuple[MethodGain, ...],
        sizes: tuple[SizePoint, ...],
        *,
        late: bool,
    ) -> Trail:
        """Return what was tried and measured on the way to a result."""
        costs = self.__dict__.get("costs")
        noise = self.__dict__.get("noise", SILENT)
        chosen = result.candidate
        is_spared = bool(self.search.accuracy.methods) and self.search.spares_methods(self.scheme)
        trail = Trail(
            measured=len(self._workshop.tried),
            late=late,
            sizes=sizes,
            gains=gains,
            skipped_at_sqnr=self.scheme.bound if is_spared and not gains else None,
            samples=self._workshop.reference.samples if self.search.compared else (),
            rounds=len(self.search.judging),
        )
        if costs is None:
            return trail
        alone = [
            NodeSensitivity(decision.node, decision.mode, sqnr_of_ratio(error))
            for decision in self.scheme.plan.decisions
            if (error := costs.error_of(decision.node, noise) or noise.nodes.get(decision.node, 0.0))
        ]
        trail = replace(trail, sensitivities=tuple(sorted(alone, key=lambda node: node.sqnr)))
        if not costs.has_times:
            return trail
        times = costs.times_of(chosen.plan)
        tried = _distinct((*self._workshop.tried.values(), chosen))
        points = [_point(candidate, chosen) for candidate in tried if candidate.nanoseconds]
        floats = Point(0, 0, costs.floats.total / 1e6, math.inf, 1.0, is_float=True)
        return replace(
            trail,
            frontier=tuple(sorted((*points, floats), key=lambda point: point.milliseconds)),
            regions=find_regions(costs.graph, chosen.plan, costs.floats, times) if chosen.plan.decodes else (),
            times=node_times(chosen.plan, costs.floats, times),
        )


def _worse(candidate: Candidate, allocation: Allocation) -> float:
    """Return the measured over the expected error; NaN if one is unknown."""
    is_known = math.isfinite(candidate.bound) and allocation.error > 0
    return ratio_of_sqnr(candidate.bound) / allocation.error if is_known else math.nan


def _slower(result: SearchResult) -> str:
    """Return the reason to only store weights, given a model that does not keep up with float.

    It names no time, which differs between runs: the plan is part of what a certificate identifies.
    """
    how = "as integers" if multiplies_integers(result.candidate.plan) else "with weights dequantized in each run"
    return f"{how} the model was not faster than in float"


def _closed(result: SearchResult | None) -> SearchResult | None:
    """Return a result without open sessions, whose memory the next model needs."""
    return None if result is None else replace(result, verification=result.verification.closed)


def _shapes(sample: Sample) -> str:
    return str(sorted((name, np.shape(array)) for name, array in sample.items()))


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the last of all candidates with the same model."""
    return list({candidate.plan.effect: candidate for candidate in candidates}.values())


def _point(candidate: Candidate, chosen: Candidate) -> Point:
    plan = candidate.plan
    return Point(
        plan.count(Mode.STATIC),
        plan.count(Mode.DYNAMIC),
        (candidate.nanoseconds or 0.0) / 1e6,
        candidate.bound,
        candidate.speed,
        plan.effect == chosen.plan.effect,
        plan.count(Mode.WEIGHT_ONLY),
        sqnr_of_ratio(candidate.expected) if candidate.expected else None,
    )
