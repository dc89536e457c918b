"""One session of the float model in which any of what a plan makes codes of can be codes: questions without builds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Self

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.recipe import Recipe
from onnxq.data.inputs import Sample
from onnxq.evaluation.comparison import View
from onnxq.evaluation.sqnr import Pair, influence_by_sample, noise_by_sample
from onnxq.passes.quantize.switch_codes import Switches
from onnxq.planning.plan import Plan
from onnxq.search.trials import Trials


@dataclass(frozen=True, order=True)
class Source:
    """Where noise comes from.

    Attributes:
        name: of a tensor that becomes codes, or of a node whose weights or dynamic data do.
        is_node: which of the two.
    """

    name: str
    is_node: bool = False


@dataclass(frozen=True, eq=False)
class Switchboard:
    """The float model with switches.

    Attributes:
        trials: the samples, and what the float model gives for them.
        view: the model with switches.
        switches: the input that says what is codes.
    """

    trials: Trials
    view: View
    switches: Switches

    @classmethod
    def of(cls, trials: Trials, plan: Plan, recipe: Recipe, nodes: Set[str] | None = None) -> Self:
        """Build the model that answers for everything that a plan makes codes of.

        Args:
            trials: builds from the same evidence as candidates are.
            plan: says what becomes codes.
            recipe: how these are chosen.
            nodes: those whose own codes are asked about, and no tensors; None asks about all.
        """
        path = trials.bench.prepared.with_name("switched.onnx")
        switches = trials.bench.build_switched(plan, trials.evidence, recipe, path, nodes)
        large = trials.bench.is_large
        return cls(trials, trials.answered.views.open(path, mapped=large, at_once=not large), switches)

    @property
    def sources(self) -> tuple[Source, ...]:
        """All there are, tensors first."""
        return (*map(Source, self.switches.tensors), *(Source(node, is_node=True) for node in self.switches.nodes))

    def noises(self, asked: Iterable[Collection[Source]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        """Return the noise-to-signal ratio of each output for several sets of codes, see `noise_by_sample`.

        Args:
            asked: what is codes in each; all else is float.
            samples: places of those to run.

        Returns:
            For each set float64 of shape (samples, outputs), in units of the signal of these samples.
        """
        return map(noise_by_sample, self._pairs(asked, samples))

    def everything(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the noise of all there are together, and how much each sample counts, see `influence_by_sample`.

        Returns:
            Both float64 of shape (samples, outputs).
        """
        [pairs] = self._pairs([self.sources], range(len(self.trials.answered.samples)))
        return noise_by_sample(pairs), influence_by_sample(pairs, self.trials.answered.files)

    def _pairs(self, asked: Iterable[Collection[Source]], samples: Sequence[int]) -> Iterator[list[Pair]]:
        """Yield what the float model and the one with some sets of codes gave for samples."""
        expected, given = self.trials.answered.expected, self.trials.answered.given
        fed = ({**given[place], **self._switched(coded)} for coded in asked for place in samples)
        answers = self.view.run_each(fed)
        while some := list(islice(answers, len(samples))):
            yield list(zip((expected[place] for place in samples), some, strict=True))

    def _switched(self, coded: Collection[Source]) -> Sample:
        values = np.zeros(len(self.switches), np.bool_)
        values[[self._place(source) for source in coded]] = True
        return {self.switches.name: values}

    def _place(self, source: Source) -> int:
        return (self.switches.nodes if source.is_node else self.switches.tensors)[source.name]
