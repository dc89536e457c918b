"""The fastest plan that is accurate enough: that of the scheme, or what a minimum cut of time and error makes of it.

1. The plan of the scheme, with ranges from minimum to maximum. If it misses the aim, more accurate encodings of it.
2. The float model, this plan's and one for each other way to run nodes are profiled: the time of each node and border.
3. The plan of least time, an exact minimum cut. If it is accurate, it is a candidate.
4. Otherwise the error of each quantizer is measured in one session, and time plus price times error is minimised. The
   lowest price that reaches the aim is found by bisection; between it and the next one, the nodes of highest error stay
   in float.
5. The fastest two that are accurate run beside the float model. The scheme's own wins unless another is clearly faster.
6. The model is judged on the holdout. On a miss the aim rises once by what was lacking.
7. If no integers are accurate and fast enough, weights are only stored, with more bits where the goal needs them.

One deadline ends all of it in the best candidate so far.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from onnxq.calibration.provenance import file_digest, sample_digest
from onnxq.config.effort import AccuracyEffort, Effort
from onnxq.config.scheme import Mode
from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import evenly
from onnxq.errors import EngineError
from onnxq.evaluation.goal import Goal, aim_of, lacking_bound
from onnxq.evaluation.latency import ENOUGH, NOT_SLOWER, measure_latencies
from onnxq.evaluation.verification import COMPARED_SAMPLES, Verification, Verifier
from onnxq.ir import all_graphs, constants
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.planning.plan import DECODING, Demotion, Plan
from onnxq.runtime.engine import Engine, OnnxRuntime
from onnxq.search.accuracy_methods import have_methods, improved, replayed, requests_gptq, with_requested_gptq
from onnxq.search.bit_allocation import CERTIFICATE_BYTES, BitAllocator, WeightFormat, weight_formats
from onnxq.search.candidate import Candidate, Recipe, Workshop, multiplies_integers
from onnxq.search.costs import SILENT, Choice, Costs, Noise, offers_of
from onnxq.search.kernel_times import NodeTimes, find_regions, node_times, trace_kernels
from onnxq.search.results import MethodGain, NodeSensitivity, Point, SearchResult, SizePoint, Trail
from onnxq.search.sensitivity import Sensitivities, by_kind_of_layer, measure_sensitivities
from onnxq.search.times import MeasuredTimes, times_key
from onnxq.system.failures import tolerate
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.resources import NEVER, Deadline

_LOG = logging.getLogger(__name__)

# Decibels above the goal at which plans are aimed without a holdout: they were chosen by the samples that judge them.
_NO_HOLDOUT_DB = 4.0
# Nothing in float32 reaches more. A metric falls as the error rises, so the lowest SQNR is tried first; bits of weights
# reach more than integers do.
_HIGHEST_AIM_DB = 150.0
_METRIC_AIMS_DB = (8.0, 11.0, 14.0, 17.0, 20.0, 23.0, 26.0, 30.0, 35.0, 40.0)
_BITS_AIMS_DB = (*_METRIC_AIMS_DB, 45.0, 50.0, 55.0)
# Weights that are only stored aim this far above the last aim of a metric.
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
# Seconds of a profile, and the fewest and most runs in it.
_PROFILED_SECONDS, _FEWEST_RUNS, _MOST_RUNS = 0.2, 4, 30
# Other ways to run nodes are not worth a model if the nodes take a smaller share of a run.
_LEAST_SHARE = 0.05
# Samples that models are timed on, seconds for each in a race, and how often all are loaded anew.
_TIMED_SAMPLES, _RACE_SECONDS, _ROUNDS = 4, 0.5, 3
# Runs for each sample that measure the layers of a large model in groups.
_LARGE_RUNS = 3
# Part of the time for more accurate encodings.
_ENCODING_PART = 1 / 2
# Seconds to build, load and check the last model.
_BUILD_SECONDS = 2.0
_STORED = "the integer model is not accurate and fast enough"


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
        judging: seconds of each look at the holdout, by which the time of the effort is longer.
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
        scheme, gains = self.scheme(self.workshop.model.plan({}))
        choices = Choices(self, scheme)
        choose = choices.smallest if self.chooses_bits else choices.fastest
        result, sizes, passed, reached, looks, late = None, tuple[SizePoint, ...](), self._aims[0], -math.inf, 0, False
        for aim in self._aims if not stored or self.chooses_bits else ():
            result = _closed(result)
            if result is not None and self.goal.metric is None:
                # What the last plan had above its aim was luck too.
                aim = min(reached + result.lacks(self.goal), _HIGHEST_AIM_DB)
            elif aim <= reached:
                continue
            chosen = None
            with tolerate("the search for the fastest plan"):
                chosen, sizes = choose(aim)
            late = self._is_late
            if chosen is None and late:
                chosen = choices.best_so_far()
            if chosen is None:
                break
            looks += 1
            result = self._judged(chosen, looks)
            passed, reached = aim, max(aim, chosen.bound)
            if self._is_good(result) or self._is_last(result):
                break
        if result is None or not result.keeps_up or not (self._is_good(result) or self.chooses_bits):
            # The weights of a model that was only slow need no more accuracy than it was chosen for.
            aim = passed if result is None or self._is_good(result) else self._above(max(reached, passed), result)
            result, looks, late = self._stored(choices, _closed(result), aim, looks)
        return replace(result, trail=choices.trail(result, gains, sizes, looks, late=late))

    def applied(self) -> SearchResult:
        """Judge the plan of the scheme without a search; the bits of weights may still be chosen for a size."""
        scheme, gains = self.scheme(self.workshop.model.plan({}))
        choices, chosen, sizes = Choices(self, scheme), scheme, tuple[SizePoint, ...]()
        if self.goal.max_size is not None:
            with tolerate("the choice of bits"):
                chosen, sizes = choices.smallest(self._aims[0])
        result = self._judged(chosen, 1)
        return replace(result, trail=choices.trail(result, gains, sizes, 1, late=self._is_late))

    def replayed(self, plan: Plan) -> SearchResult:
        """Judge a plan as it is."""
        candidate = self.workshop.built(plan, replayed(self.workshop, plan, self.samples))
        return self._judged(candidate, 1)

    def scheme(self, plan: Plan) -> tuple[Candidate, tuple[MethodGain, ...]]:
        """Return the candidate of the scheme, more accurately encoded if it misses the aim."""
        recipe = self.recipe
        if requests_gptq(plan):
            recipe = with_requested_gptq(self.workshop, plan, recipe, self.samples)
        aim = math.inf if self.accuracy.thorough or self.goal.metric is not None else self._aims[0]
        # Without a search only methods need the error; a large model would run once more for nothing.
        if not self.measures or (self.effort is None and not have_methods(plan, recipe, self.accuracy)):
            return self.workshop.built(plan, recipe), ()
        first = self.workshop.measured(plan, recipe)
        _LOG.debug("scheme: %.1f dB, bound %.1f dB", first.sqnr, first.bound)
        if first.bound >= aim or self._is_late:
            return first, ()
        wanted = self._aims[0] if self.goal.metric is None else math.inf
        until = self.until.part(_ENCODING_PART) if self.until != NEVER else NEVER
        return improved(self.workshop, first, self.samples, self.accuracy, aim, until, wanted=wanted)

    def _stored(
        self, choices: Choices, before: SearchResult | None, aim: float, looks: int
    ) -> tuple[SearchResult, int, bool]:
        """Judge plans that compute in float; return how many were judged in all, and whether time ran out.

        `before` stays if the engine's own floats miss the goal.
        """
        if before is not None and before.verification.floats_miss(self.goal.min_sqnr):
            return before, looks, self._is_late
        result, late = before, self._is_late
        for _ in range(_LOOKS):
            candidate = choices.stored(min(aim, _HIGHEST_AIM_DB), before)
            late = self._is_late
            if result is not None and candidate.plan.effect == result.candidate.plan.effect:
                break
            looks, result = looks + 1, _closed(result)
            result = self._judged(candidate, looks)
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
        return result, looks, late

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
        """Return whether the scheme was accurate enough to try no accuracy method."""
        return bool(self.accuracy.methods) and not self.accuracy.thorough and scheme.bound >= self._aims[0]

    # Judging

    def _judged(self, candidate: Candidate, look: int) -> SearchResult:
        """Verify a candidate on the holdout; without one, each model that was tried counts as a look at the samples."""
        looks = look if self._has_holdout else look + self.compared
        if not candidate.path.exists():
            # It was removed when it missed another aim.
            candidate = self.workshop.built(candidate.plan, candidate.recipe)
        self.workshop.progress("verify", 0, 0)
        start = time.monotonic()
        verification = self.verifier.verified(candidate.path, looks)
        scores = self.verifier.scores(candidate.path, look)
        self.judging.append(time.monotonic() - start)
        return SearchResult(candidate, verification, scores, self._keeps_up(candidate, verification))

    @property
    def compared(self) -> int:
        """Number of candidates that the search samples chose by; without a search a single one is no choice."""
        return len(self.workshop.trail) - (self.effort is None and len(self.workshop.trail) == 1)

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
        key = self.key(file_digest(candidate.path), "verdict")
        if all(one.is_shown for one in verification.latencies):
            self.times.speed(key, speed)
        clearly_slower = any(one.interval[1] < NOT_SLOWER for one in verification.latencies)
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
    def measures(self) -> bool:
        """Whether candidates are run on samples."""
        return bool(len(self.samples)) and (self.effort is not None or bool(self.accuracy.methods))

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
    def _is_late(self) -> bool:
        return self.until.left <= 0

    @cached_property
    def engine(self) -> Engine:
        """What times models."""
        return next(iter(self.verifier.engines), OnnxRuntime())

    @cached_property
    def timed_samples(self) -> tuple[Sample, ...]:
        """The samples that models are timed on."""
        return tuple(evenly(self.workshop.reference.samples, _TIMED_SAMPLES))

    def key(self, model: str, what: str) -> str:
        """Return the key of a measurement of a model, given its digest."""
        beside = f"{what} beside {file_digest(self.reference)}"
        return times_key(model, map(sample_digest, self.timed_samples), beside, self.engine)


@dataclass(frozen=True, eq=False)
class Choices:
    """What a search measures once of the candidate of the scheme, and the choices that rest on it."""

    search: Search
    scheme: Candidate

    @property
    def _workshop(self) -> Workshop:
        return self.search.workshop

    @property
    def _effort(self) -> Effort:
        assert self.search.effort is not None
        return self.search.effort

    @property
    def _is_late(self) -> bool:
        return self.search.until.left <= 0

    # The fastest

    def fastest(self, aim: float) -> tuple[Candidate | None, tuple[SizePoint, ...]]:
        """Return the fastest of the plans that reach an aim; None if none does."""
        costs, scheme = self.costs, replace(self.scheme, nanoseconds=self.costs.whole.nanoseconds)
        accurate = [scheme] if scheme.bound >= aim else []
        quick = costs.best(SILENT, 0.0) if costs.is_timed else costs.whole
        # The cut of least time is worth a model if it is to be clearly faster.
        if quick.nanoseconds * _CLEARLY < costs.whole.nanoseconds:
            candidate = self._candidate(quick, SILENT)
            accurate += [candidate] if candidate.bound >= aim else self._priced(aim)
        elif not accurate:
            accurate = self._priced(aim)
        if not costs.is_timed:
            accurate += self._uniform(aim)
        ranked = sorted(_distinct(accurate), key=lambda one: one.nanoseconds or 0.0)
        own = [one for one in ranked[self._effort.timed :] if one.plan.effect == scheme.plan.effect]
        return self._raced([*ranked[: self._effort.timed - len(own)], *own], scheme), ()

    def _priced(self, aim: float, *, integers: bool = True) -> list[Candidate]:
        """Return plans that reach an aim, by bisection for the lowest price of error that does.

        Weights take more bits within a few percent of the file, or within more where the aim needs it.
        """
        noise, costs, accurate = self.noise, self.costs, list[Candidate]()
        for share in _MORE_BYTES:
            if accurate or self._is_late:
                break
            finer = costs.worth_more_bits(noise, share * self.scheme.bytes)
            best = partial(costs.best, noise, finer=finer, integers=integers)
            accurate = self._bisected(best, aim, integers=integers)
        return accurate

    def _bisected(self, best: partial[Choice], aim: float, *, integers: bool) -> list[Candidate]:
        allowed, total = 10 ** (-aim / 10), self.costs.floats.total
        prices = [total / allowed * _FIRST_PRICE * _PRICE_STEP**number for number in range(_PRICES)]
        solved: dict[int, Choice] = {}

        def choice(number: int) -> Choice:
            if number not in solved:
                solved[number] = best(prices[number])
            return solved[number]

        # The first model is that of the lowest price whose expected error is the allowed one.
        low, high = 0, _PRICES - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if choice(middle).error <= allowed else (middle + 1, high)
        number, low, high, accurate = low, -1, _PRICES, list[Candidate]()
        for _ in range(self._effort.tried):
            if high - low <= 1 or self._is_late:
                break
            candidate = self._candidate(choice(number), self.noise)
            if self._is_accurate(candidate, aim):
                high = number
                accurate.append(candidate)
            elif choice(number) == choice(_PRICES - 1):
                # Nothing is more accurate.
                break
            else:
                low = number
            number = (low + high) // 2
        if accurate and low >= 0 and integers:
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
            if high - low <= 1 or self._is_late:
                break
            middle = (low + high) // 2
            choice = best(price, without=frozenset(loud[:middle]))
            if choice.nanoseconds * _CLEARLY > least:
                high = middle
                continue
            candidate = self._candidate(choice, self.noise)
            if self._is_accurate(candidate, aim):
                high, least = middle, choice.nanoseconds
                yield candidate
            else:
                low = middle

    def _uniform(self, aim: float) -> Iterator[Candidate]:
        """Yield accurate plans in which all possible nodes run in one other way, where nodes are not timed."""
        for offer in self.costs.offers if self.search.is_timed else ():
            if not self._is_late and offer.plan.effect != self.scheme.plan.effect:
                candidate = self._workshop.measured(offer.plan, self.scheme.recipe)
                if self._is_accurate(candidate, aim):
                    yield candidate

    def _candidate(self, choice: Choice, noise: Noise) -> Candidate:
        plan = self._workshop.model.plan(self.costs.demotions(choice, noise))
        candidate = self._workshop.measured(plan, self.scheme.recipe, choice.nanoseconds, choice.error)
        _LOG.debug("%s: %.1f dB, bound %.1f dB", choice, candidate.sqnr, candidate.bound)
        return candidate

    def _is_accurate(self, candidate: Candidate, aim: float) -> bool:
        """Return whether a candidate reaches an aim; the file of one that does not is removed."""
        if candidate.bound < aim and candidate.path != self.scheme.path:
            candidate.discard()
        return candidate.bound >= aim

    def best_so_far(self) -> Candidate | None:
        """Return the scheme's candidate, or else the most accurate one, if the search samples promise the goal."""
        goal, recipe = self.search.goal, self.scheme.recipe
        promised = [
            one
            for one in (self.scheme, *self._workshop.trail)
            if goal.metric is None and one.bound >= goal.min_sqnr and one.recipe.statistics is recipe.statistics
        ]
        return max(promised, key=lambda one: (one is self.scheme, one.bound), default=None)

    # The smallest

    def smallest(self, aim: float) -> tuple[Candidate, tuple[SizePoint, ...]]:
        """Return the candidate of least error in the wanted size, or that of the smallest file that reaches an aim.

        With it, sizes that the model could have.
        """
        formats = self._formats
        goal, workshop, recipe = self.search.goal, self._workshop, self.scheme.recipe
        most = goal.max_size if isinstance(goal.max_size, int) and not goal.prefers_size else None
        measures = self.search.measures and self.search.effort is not None and not self._is_late
        if not formats or (most is None and not measures):
            return self.scheme, ()

        def sqnr(plan: Plan) -> float:
            return workshop.measured(plan, recipe).bound

        def size(plan: Plan) -> float:
            return (workshop.measured if measures else workshop.built)(plan, recipe).bytes

        def nsr(plan: Plan, nodes: Set[str]) -> Mapping[str, float]:
            return self._sensitivities(plan, nodes, len(nodes)).nodes

        others = sum(one.nbytes for one in constants(workshop.model.graph))
        overhead = others - sum(one[-1].bytes for one in formats.values())
        allocator = BitAllocator(
            workshop.model.plan,
            formats,
            overhead,
            nsr if measures else None,
            sqnr if measures else None,
            None if workshop.model.is_large else size,
        )
        if most is not None:
            plan, sizes = allocator.within(most - CERTIFICATE_BYTES, aim)
        else:
            plan, sizes = allocator.smallest(aim, lambda: self._is_late, self._effort.tried)
        return (workshop.measured if measures else workshop.built)(plan, recipe), sizes

    @cached_property
    def _formats(self) -> Mapping[tuple[str, ...], Sequence[WeightFormat]]:
        """The formats of each weight."""
        model = self._workshop.model
        return weight_formats(model.plan, model.graph, model.target, model.expresses)

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
        decoding = {
            one.node: Demotion(Mode.STORAGE, why)
            for one in self.scheme.plan.decisions
            if one.mode in DECODING and one.weights
        }
        plans.append(self._workshop.model.plan(decoding))
        recipe = self.scheme.recipe
        if not self.search.measures or (before is not None and self.search.chooses_bits):
            return self._workshop.built(plans[0], recipe)
        tried = list[Candidate]()
        for plan in plans:
            tried.append(self._workshop.measured(plan, recipe))
            if tried[-1].bound >= aim:
                return tried[-1]
        # No weight gets more bits because time ran out.
        if not self._is_late:
            with tolerate("weights of more bits"):
                if accurate := self._priced(aim, integers=False):
                    return min(accurate, key=lambda one: one.bytes)
        return max(tried, key=lambda one: one.bound)

    def _as_stored(self, plan: Plan, why: str) -> Plan:
        """Return the plan with the same weights, dequantized at load."""
        demotions = {}
        for one in plan.decisions:
            if one.weights and one.mode is not Mode.FLOAT:
                demotions[one.node] = Demotion(Mode.STORAGE, why, weight=one.weights[0].spec, finer=one.finer)
            elif self.scheme.plan.by_node[one.node].weights:
                # Quantization was too coarse for this node.
                demotions[one.node] = Demotion(Mode.FLOAT, one.reason, one.figures, finer=one.finer)
        return self._workshop.model.plan(demotions)

    # Measurements

    @cached_property
    def costs(self) -> Costs:
        """The costs of nodes: by profiles, or by their weights where no times are valid."""
        model, plan = self._workshop.model, self.scheme.plan
        if not self.search.is_timed or self._is_late:
            # Each offer for a large model would be another model with all weights.
            return Costs.of(model, plan, None, () if model.is_large else tuple(offers_of(model, plan)))
        engine = self.search.engine
        if not engine.profiles:
            return Costs.of(model, plan, None, tuple(offers_of(model, plan)))
        progress = self._workshop.progress
        progress("profile", 0, 3)
        floats = self.times(None)
        progress("profile", 1, 3)
        scheme = self.times(self.scheme)
        if not floats.nodes or not scheme.nodes:
            # A run makes too many events for a profile, as long loops do.
            return Costs.of(model, plan, None, tuple(offers_of(model, plan)))
        offers = []
        for offer in offers_of(model, plan):
            progress("profile", 2, 3)
            taken = sum(floats.nodes.get(node, 0.0) for node in offer.nodes)
            if taken > _LEAST_SHARE * floats.total and not self._is_late and offer.plan.effect != plan.effect:
                with tolerate("the profile of other ways to run nodes"):
                    candidate = self._workshop.measured(offer.plan, self.scheme.recipe)
                    offers.append(replace(offer, times=self.times(candidate)))
        progress("profile", 3, 3)
        return Costs.of(model, plan, (floats, scheme), tuple(one for one in offers if one.times.nodes))

    def times(self, candidate: Candidate | None) -> NodeTimes:
        """Return the times of a candidate's nodes, known or measured now; None stands for the float model."""
        search, model = self.search, self._workshop.model
        path, digest, quantized = model.prepared, model.digest, dict[str, str]()
        if candidate is not None:
            path, digest, quantized = candidate.path, file_digest(candidate.path), dict(candidate.quantized)

        def measured() -> NodeTimes:
            samples = search.timed_samples
            if len(list(all_graphs(model.graph))) == 1:
                # Without bodies, times depend on shapes alone.
                samples = tuple({_shapes(sample): sample for sample in samples}.values())
            runs = min(max(round(_PROFILED_SECONDS / self._workshop.run_seconds), _FEWEST_RUNS), _MOST_RUNS)
            with wrap_plugin_errors(f"engine {search.engine.name!r}", EngineError):
                kernels = search.engine.profile(path, samples, model.prepared.parent, math.ceil(runs / len(samples)))
            return trace_kernels(kernels, model.graph, quantized)

        return search.times.of_nodes(search.key(digest, "nodes"), measured)

    @cached_property
    def noise(self) -> Noise:
        """The errors of the scheme's quantizers, and of the nodes in each offer that are faster in it than in float."""
        floats = self.costs.floats.nodes
        return self.noise_of(lambda name, time: time < floats.get(name, 0.0))

    def noise_of(self, counts: Callable[[str, float], bool]) -> Noise:
        """Measure the errors of the scheme's quantizers, and of the nodes in offers that count by their times there."""
        plan, costs = self.scheme.plan, self.costs
        # Dynamic nodes can always have stored weights instead.
        dynamic = {one.node: Demotion(Mode.STORAGE, _STORED) for one in plan.decisions if one.mode is Mode.DYNAMIC}
        parts: list[tuple[Mode | None, Plan, Set[str] | None]] = [(None, self._workshop.model.plan(dynamic), None)]
        for offer in costs.offers:
            times = costs.offered(offer.mode)
            nodes = {name for name in offer.nodes if counts(name, times[name])}
            parts += [(offer.mode, offer.plan, nodes)] if nodes else []
        seen = {mode: self._sensitivities(plan, nodes, self._runs // len(parts)) for mode, plan, nodes in parts}
        return Noise(seen[None], {mode: one for mode, one in seen.items() if mode is not None})

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
        run = self.costs.floats.total / 1e9 if self.costs.is_timed else workshop.run_seconds
        process = workshop.process_seconds
        return 1 << round(math.log2(max(self._effort.sensitivity * process / max(run, 1e-6), 1.0)))

    def _raced(self, ranked: Sequence[Candidate], scheme: Candidate) -> Candidate | None:
        """Return the fastest of a few candidates, timed beside the float model; None if all are clearly slower."""
        search = self.search
        if len(ranked) < 2 or not search.is_timed or self._is_late:
            return next(iter(ranked), None)
        keys = [search.key(file_digest(one.path), "speed") for one in ranked]
        if not all(key in search.times.speeds for key in keys):
            with tolerate("timing models that were tried"):
                latencies = measure_latencies(
                    (search.reference, *(one.path for one in ranked)),
                    search.timed_samples,
                    seconds=min(_RACE_SECONDS, search.verifier.seconds) * len(ranked),
                    rounds=_ROUNDS,
                    enough=ENOUGH,
                    engine=search.engine,
                )
                if all(one.interval[1] < NOT_SLOWER for one in latencies):
                    return None
                for key, latency in zip(keys, latencies, strict=True):
                    search.times.speed(key, latency.speed)
        timed = [replace(one, speed=search.times.speeds.get(key)) for one, key in zip(ranked, keys, strict=True)]
        _LOG.debug("speeds: %s", [one.speed for one in timed])
        by_path = {one.path: one for one in timed}
        self._workshop.trail[:] = [by_path.get(one.path, one) for one in self._workshop.trail]
        most = max(one.speed or 0.0 for one in timed)
        alike = [one for one in timed if (one.speed or 0.0) * _CLEARLY >= most]
        own = next((one for one in alike if one.plan.effect == scheme.plan.effect), None)
        # Of equally fast plans that of the scheme is the simplest, and then the most accurate one is worth most.
        return own or max(alike, key=lambda one: one.bound)

    # What a report tells

    def trail(
        self,
        result: SearchResult,
        gains: tuple[MethodGain, ...],
        sizes: tuple[SizePoint, ...],
        looks: int,
        *,
        late: bool,
    ) -> Trail:
        """Return what was tried and measured on the way to a result."""
        costs = self.__dict__.get("costs")
        noise = self.__dict__.get("noise", SILENT)
        chosen = result.candidate
        trail = Trail(
            measured=len(self._workshop.trail),
            late=late,
            sizes=sizes,
            gains=gains,
            skipped_at_sqnr=self.scheme.bound if self.search.spares_methods(self.scheme) and not gains else None,
            samples=self._workshop.reference.samples if self.search.compared else (),
            rounds=looks,
        )
        if costs is None:
            return trail
        alone = [
            NodeSensitivity(one.node, one.mode, sqnr_of_ratio(error))
            for one in self.scheme.plan.decisions
            if (error := costs.error_of(one.node, noise) or noise.scheme.nodes.get(one.node, 0.0))
        ]
        trail = replace(trail, sensitivities=tuple(sorted(alone, key=lambda one: one.sqnr)))
        if not costs.is_timed:
            return trail
        times = costs.times_of(chosen.plan)
        points = [_point(one, chosen) for one in _distinct((*self._workshop.trail, chosen)) if one.nanoseconds]
        floats = Point(0, 0, costs.floats.total / 1e6, math.inf, 1.0, is_float=True)
        return replace(
            trail,
            frontier=tuple(sorted((*points, floats), key=lambda one: one.milliseconds)),
            regions=find_regions(costs.graph, chosen.plan, costs.floats, times) if chosen.plan.decodes else (),
            times=node_times(chosen.plan, costs.floats, times),
        )


def _slower(result: SearchResult) -> str:
    """Return the reason to only store weights, given a model that does not keep up with float."""
    how = "as integers" if multiplies_integers(result.candidate.plan) else "with weights dequantized in each run"
    latency = result.verification.latency
    if latency is not None and latency.speed < NOT_SLOWER:
        return f"{how} the model ran {latency.speed:.2f} times as fast as in float"
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
