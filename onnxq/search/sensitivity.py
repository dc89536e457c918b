"""Sensitivities: the error that each quantizer adds to each output, measured in one session with switches."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from onnxq.config.scheme import Mode
from onnxq.data.inputs import Sample
from onnxq.evaluation.comparison import ComparisonSession
from onnxq.evaluation.reference import ReferenceOutputs
from onnxq.evaluation.sqnr import nsr_by_sample
from onnxq.ir import Graph, all_graphs, is_constant
from onnxq.numerics.affine import worst_ratio
from onnxq.passes.quantize.fake_quant_switches import FakeQuantSwitches
from onnxq.system.resources import NEVER, Deadline

Ratios = NDArray[np.float64]
"""Noise-to-signal ratio of each output."""

# Stands for the ratio of outputs that are not finite, because sums need a finite number.
_LARGEST = 1e10


@dataclass(frozen=True, order=True)
class QuantizerId:
    """A quantizer.

    Attributes:
        name: a quantized tensor, or a node with quantized weights or dynamic activations.
        is_node: True for a node.
    """

    name: str
    is_node: bool = False


@dataclass(frozen=True, eq=False)
class SwitchedSession:
    """The float model with a switch for each quantizer.

    Attributes:
        reference: the search samples, with the outputs of the float model.
    """

    reference: ReferenceOutputs
    session: ComparisonSession
    switches: FakeQuantSwitches

    @property
    def quantizers(self) -> tuple[QuantizerId, ...]:
        """All quantizers in the order of the plan, tensors first."""
        nodes = (QuantizerId(name, is_node=True) for name in self.switches.nodes)
        return (*map(QuantizerId, self.switches.tensors), *nodes)

    def errors(self, sets: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        """Yield the noise-to-signal ratios with some quantizers on and all else in float.

        Args:
            sets: the quantizers that are on.
            samples: indices of the samples to run.

        Returns:
            For each set float64 of shape (samples, outputs), in units of the signal of these samples.
        """
        expected, inputs = self.reference.expected, self.reference.given
        fed = ({**inputs[index], **self._switched(quantizers)} for quantizers in sets for index in samples)
        answers = self.session.run_each(fed)
        while outputs := list(itertools.islice(answers, len(samples))):
            ratios = nsr_by_sample(list(zip((expected[index] for index in samples), outputs, strict=True)))
            yield np.nan_to_num(ratios, nan=_LARGEST, posinf=_LARGEST).clip(0.0, _LARGEST)

    def _switched(self, quantizers: Collection[QuantizerId]) -> Sample:
        values = np.zeros(len(self.switches), np.bool_)
        for quantizer in quantizers:
            values[(self.switches.nodes if quantizer.is_node else self.switches.tensors)[quantizer.name]] = True
        return {self.switches.name: values}


@dataclass(frozen=True, eq=False)
class Sensitivities:
    """The error that each quantizer adds, and the error of all together.

    Attributes:
        ratios: noise-to-signal ratio of each output by quantizer, measured alone or as its share of a group.
        alone: the quantizers that were measured alone.
        joint: noise-to-signal ratio of each output with all quantizers.
        modes: ratio at the worst output that nodes add in other modes than that of the scheme, by mode and node.
    """

    ratios: Mapping[QuantizerId, Ratios] = field(default_factory=lambda: MappingProxyType({}))
    alone: frozenset[QuantizerId] = frozenset()
    joint: Ratios = field(default_factory=lambda: np.zeros(0))
    modes: Mapping[Mode, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def tensors(self) -> Mapping[str, float]:
        """The ratio of each tensor at its worst output."""
        return {source.name: worst_output_nsr(ratio) for source, ratio in self.ratios.items() if not source.is_node}

    @cached_property
    def nodes(self) -> Mapping[str, float]:
        """The ratio of each node's own quantizers, such as its weights, at its worst output."""
        return {source.name: worst_output_nsr(ratio) for source, ratio in self.ratios.items() if source.is_node}

    def of(self, quantizers: Iterable[QuantizerId]) -> float:
        """Return the ratio at the worst output of the sum of some quantizers."""
        ratios = [self.ratios[quantizer] for quantizer in quantizers if quantizer in self.ratios]
        return worst_output_nsr(np.sum(ratios, axis=0)) if ratios else 0.0

    def of_mode(self, mode: Mode, node: str) -> float:
        """Return the ratio that a node adds in another mode; 0 if unknown."""
        return self.modes.get(mode, {}).get(node, 0.0)


SILENT = Sensitivities()
"""No quantizer adds any error, so only time counts."""


def worst_output_nsr(ratios: Ratios) -> float:
    """Return the ratio at the worst output, limited to a finite number."""
    return min(worst_ratio(ratios), _LARGEST)


def typical_sample(nsr: NDArray[np.float64]) -> int:
    """Return the index of the median sample by cumulative error, from the lowest error on.

    This is the sample of highest error if it has half of the total error.

    >>> typical_sample(np.array([5.0, 1.0, 3.0])), typical_sample(np.array([5.0, 1.0, 5.0, 4.0, 6.0]))
    (0, 2)
    """
    order = np.argsort(nsr, kind="stable")
    return int(order[int(np.searchsorted(np.cumsum(nsr[order]), nsr.sum() / 2))])


def measure_sensitivities(
    board: SwitchedSession,
    runs: int,
    *,
    order: Callable[[QuantizerId], tuple[bool, int]] | None = None,
    until: Deadline = NEVER,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sensitivities:
    """Measure the error that each quantizer adds, on the sample of median error.

    If there are more quantizers than runs, half of the runs measure groups of neighbors of one size, and the other half
    splits the group of highest error in two, again and again. The errors of the halves alone divide the error of their
    group, and the quantizers of a group share its error equally. All is scaled to the joint error of all samples.

    Args:
        board: the float model with switches.
        runs: sample runs besides those of all quantizers together; 0 measures only these.
        order: sort key by which quantizers are neighbors; None keeps the order of the plan.
        until: after it, no group is measured or split.
        progress: called with the number of runs so far and the number expected.
    """
    quantizers = sorted(board.quantizers, key=order) if order is not None else list(board.quantizers)
    if not quantizers:
        return SILENT
    [by_sample] = board.errors([quantizers], range(len(board.reference.given)))
    joint = by_sample.sum(0)
    if runs <= 0 or not joint.size:
        return Sensitivities(joint=joint)
    sample = typical_sample(by_sample[:, int(joint.argmax())])
    # The ratios of one sample are in units of its own signal.
    [whole] = board.errors([quantizers], [sample])
    scale = np.divide(joint, whole[0], out=np.ones_like(joint), where=whole[0] > 0)
    size = 1 if runs >= len(quantizers) else max(math.ceil(2 * len(quantizers) / runs), 2)
    groups = [tuple(quantizers[start : start + size]) for start in range(0, len(quantizers), size)]
    expected = min(runs, len(quantizers))
    done = 0

    def measured(parts: Sequence[Collection[QuantizerId]]) -> Iterator[Ratios]:
        nonlocal done
        for ratio in board.errors(parts, [sample]):
            done += 1
            progress(min(done, expected), expected)
            yield ratio[0] * scale

    # The loudest group is on top.
    heap: list[tuple[float, int, tuple[QuantizerId, ...], Ratios]] = []
    numbers = itertools.count()

    def push(group: tuple[QuantizerId, ...], ratio: Ratios) -> None:
        loudness = worst_output_nsr(ratio) if len(group) > 1 else -1.0
        heapq.heappush(heap, (-loudness, next(numbers), group, ratio))

    rest = joint
    for group, ratio in zip(groups, measured(groups), strict=False):
        push(group, ratio)
        rest = (rest - ratio).clip(0.0)
        if until.left <= 0:
            break
    left = groups[len(heap) :]
    for group in left:
        # What was not measured shares the error that is left.
        push(group, rest / len(left))
    while done + 2 <= runs and len(heap[0][2]) > 1 and until.left > 0:
        _, _, group, ratio = heapq.heappop(heap)
        middle = len(group) // 2
        halves = group[:middle], group[middle:]
        own = list(measured(halves))
        total = own[0] + own[1]
        for half, part in zip(halves, own, strict=True):
            push(half, ratio * np.divide(part, total, out=np.full_like(total, 0.5), where=total > 0))
    ratios = {quantizer: ratio / len(group) for _, _, group, ratio in heap for quantizer in group}
    alone = frozenset(group[0] for _, _, group, _ in heap if len(group) == 1 and group not in left)
    return Sensitivities({quantizer: ratios[quantizer] for quantizer in quantizers}, alone, joint)


def by_kind_of_layer(graph: Graph) -> Callable[[QuantizerId], tuple[bool, int]]:
    """Return a sort key that makes layers of one kind neighbors: those with the same operator and weight shapes.

    In a large network of repeated blocks, a group of neighbors then shows the error of a kind of layer at some depth.
    """
    kinds: dict[QuantizerId, object] = {}
    for scope in all_graphs(graph):
        for node in scope.nodes:
            kind = node.op, tuple(tensor.shape for tensor in node.inputs if is_constant(tensor))
            kinds[QuantizerId(node.name, is_node=True)] = kind
            kinds.update((QuantizerId(tensor.name), kind) for tensor in node.outputs)
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds.values()))}
    return lambda quantizer: (quantizer.is_node, numbers[kinds[quantizer]] if quantizer in kinds else -1)
