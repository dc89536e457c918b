"""Compare the outputs of two models on the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxq.calibration.data import Data, SamplesLike
from onnxq.data.dataset import Subset, evenly_spaced_indices, group_equal, list_shared_files
from onnxq.data.inputs import SampleSource
from onnxq.errors import CandidateError, DataError
from onnxq.evaluation.bounds import RISK, decibels_of_labels
from onnxq.evaluation.comparison import ComparisonSession, ComparisonSpec, open_pair
from onnxq.evaluation.outputs import OutputPart
from onnxq.evaluation.reference import ReferenceModel, run_beside
from onnxq.evaluation.sqnr import DetailedErrorAccumulator, WorstPlace, traced, worst_places
from onnxq.numerics.affine import decibels, sqnr_db
from onnxq.runtime.engine import Engine
from onnxq.runtime.sessions import runtime_reason
from onnxq.system.publish import staging
from onnxq.system.records import to_plain


@dataclass(frozen=True)
class OutputAgreement:
    """How well an output of a candidate, or a tensor in its place, agrees with the reference on all samples.

    Attributes:
        sqnr: decibels over all elements of all samples, infinite when equal; None for outputs that are not floating
            point.
        agreement: share of equal arg max over the last axis, for float outputs of rank 2, and rows of rank 3 that add
            up to one. For other types, the share of equal elements. None if neither applies.
        largest_error: largest absolute difference; 0 for outputs that are not floating point.
        finite: whether the candidate is finite wherever the reference is.
        compared: how many arg maxes or elements `agreement` is a share of.
        stands_for: the outputs that it decides, if the model chooses by it; else empty. See
            `onnxq.evaluation.comparison.ComparisonSpec`.
        bound: lower 95 % confidence bound of the SQNR over all other samples, see `ErrorAccumulator.bound`. None for
            outputs that are not floating point.
        worst: the samples with the lowest SQNR, the lowest first, with the element of the largest error.
        parts: the tensors that the output is concatenated from, each with its own SQNR.
        effective_labels: `effective_sample_size` of the labels that differ, as they differ together in a sample or
            file; None for floats, and for one sample whose labels each count by themselves.
        skipped: number of elements that were not compared, as the float model is NaN or infinite there.
        is_compared: whether there was any element to compare.
    """

    name: str
    sqnr: float | None
    agreement: float | None
    largest_error: float
    same_shapes: bool
    finite: bool
    compared: int
    stands_for: tuple[str, ...] = ()
    bound: float | None = None
    worst: tuple[WorstPlace, ...] = ()
    parts: tuple[OutputPart, ...] = ()
    effective_labels: float | None = None
    skipped: int = 0
    is_compared: bool = True

    @property
    def label(self) -> str:
        """How messages name it."""
        if not self.stands_for:
            return f"output {self.name}"
        return f"tensor {self.name}, compared in place of {', '.join(self.stands_for)},"

    @property
    def differing(self) -> int:
        """Number of arg maxes or elements that differ."""
        return 0 if self.agreement is None else self.compared - round(self.agreement * self.compared)

    @property
    def decibels(self) -> float:
        """The SQNR; of outputs that are not floating point, `decibels_of_labels`.

        With it, a model that outputs labels and probabilities is judged hardly more strictly than one that outputs only
        probabilities.
        """
        return (
            self.sqnr
            if self.sqnr is not None
            else decibels_of_labels(self.differing, self.compared, self.effective_labels)
        )


@dataclass(frozen=True)
class Agreement:
    """How well a candidate model agrees with a reference model.

    Attributes:
        samples: number of samples that were run.
        outputs: one entry for each compared tensor.
        files: number of files that the samples come from, if samples of one file count as one; else 0.
        free_choices: outputs that were compared behind choices that each model makes for itself.
        own_choices: the outputs that differ by more if the candidate chooses for itself; see `with_own_choices`.
    """

    samples: int
    outputs: tuple[OutputAgreement, ...]
    files: int = 0
    free_choices: tuple[str, ...] = ()
    own_choices: tuple[OutputAgreement, ...] = ()

    @property
    def chosen(self) -> tuple[str, ...]:
        """The outputs that were compared with the float model's choices given to the candidate."""
        names = {output.name for output in self.outputs if output.is_compared}
        return tuple(name for name in self._stood_for if name in names)

    @property
    def decided(self) -> tuple[str, ...]:
        """The outputs that were not compared themselves; only the tensors that decide them were."""
        names = {output.name for output in self.outputs}
        return tuple(name for name in self._stood_for if name not in names)

    @property
    def _stood_for(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for output in self.outputs for name in output.stands_for))

    @property
    def worst_sqnr(self) -> float:
        """The lowest `OutputAgreement.decibels`; infinite without outputs."""
        return min((output.decibels for output in self.outputs), default=math.inf)

    @property
    def worst_agreement(self) -> float | None:
        """The lowest arg max agreement; None if no output has one."""
        return min((output.agreement for output in self.outputs if output.agreement is not None), default=None)

    @property
    def equal_labels(self) -> float:
        """The lowest share of equal elements of outputs that are not floating point; 1 if there are none."""
        shares = (output.agreement for output in self.outputs if output.sqnr is None)
        return min((share for share in shares if share is not None), default=1.0)

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON; an infinite SQNR becomes None."""
        outputs, own = ([_plain(output) for output in some] for some in (self.outputs, self.own_choices))
        choices = {"free_choices": list(self.free_choices), "own_choices": own}
        return {"samples": self.samples, "files": self.files, "outputs": outputs, **choices}

    @property
    def sound(self) -> bool:
        """Whether every output is finite and of the right shape."""
        return all(output.same_shapes and output.finite for output in self.outputs)


def _plain(output: OutputAgreement) -> dict[str, object]:
    plain = asdict(output)
    plain |= {name: None for name in ("sqnr", "bound") if not np.isfinite(plain[name] or 0.0)}
    return plain | {name: to_plain(plain[name]) for name in ("worst", "parts")}


def compare(
    reference: ReferenceModel,
    candidate: ComparisonSession,
    samples: SampleSource,
    risk: float = RISK,
    most: int = 0,
) -> Agreement:
    """Run both models on samples and compare their outputs. At most one sample per core is in memory.

    Args:
        reference: the float model.
        candidate: a model made from it, opened with the same spec.
        samples: the data.
        risk: probability that a bound is wrong; see `alpha_spending`.
        most: number of samples to compare at most, evenly spaced; 0 compares all.

    Returns:
        The outputs in the reference's order, then the tensors compared in place of others, then choices that the other
        model makes otherwise by the float model's scores.

    Raises:
        DataError: There is no sample, or a run fails.
    """
    views, compared = reference.views, Subset(samples, evenly_spaced_indices(len(samples), most or len(samples)))
    checked = views.checked if candidate.deciding is not None else ()
    pairs = run_beside(reference, candidate, compared)
    agreement = agreement_of((*views.names, *checked), pairs, risk, views.parts, list_shared_files(compared))
    outputs = [
        replace(output, stands_for=views.stand_ins.get(output.name, ()), worst=traced(output.worst, compared))
        for output in agreement.outputs
        if output.name not in checked or output.decibels < math.inf or not output.same_shapes
    ]
    return replace(agreement, outputs=tuple(outputs), free_choices=views.free_choices)


def with_own_choices(
    agreement: Agreement,
    reference: Path,
    open_candidate: Callable[[ComparisonSpec], ComparisonSession],
    samples: SampleSource,
    risk: float = RISK,
    most: int = 0,
) -> Agreement:
    """Compare outputs once more, with the choices that the candidate makes for itself, such as experts or boxes.

    Args:
        agreement: with the float model's choices.
        reference: file of the float model.
        open_candidate: opens the candidate.
        samples: the same data.
        risk: the same probability that a bound is wrong.
        most: number of samples to compare at most, see `compare`.

    Returns:
        The agreement with `Agreement.own_choices`: outputs of lower SQNR, and labels that differ. Outputs of another
        shape are left out, as they hold another number of choices.

    Raises:
        CandidateError: A run of the candidate fails with its own choices.
    """
    if not (names := {*agreement.chosen, *agreement.decided}):
        return agreement
    whole = ComparisonSpec.whole(reference)
    try:
        free = compare(ReferenceModel(reference, whole), open_candidate(whole), samples, risk, most)
    except CandidateError as error:
        deciding = ", ".join(output.name for output in agreement.outputs if output.stands_for)
        raise CandidateError(
            f"the model does not run a sample with its own choices for {', '.join(sorted(names))}, which it runs with "
            f"the float model's: {runtime_reason(error.__cause__ or error)}; exclude the nodes that compute {deciding}"
        ) from error
    before = {output.name: output.sqnr for output in agreement.outputs}

    def differs(output: OutputAgreement) -> bool:
        if output.sqnr is None:
            return output.differing > 0
        return decibels(output.sqnr) != decibels(before.get(output.name))

    comparable = (output for output in free.outputs if output.same_shapes and output.is_compared)
    return replace(agreement, own_choices=tuple(out for out in comparable if out.name in names and differs(out)))


def compare_files(
    reference: str | Path,
    candidate: str | Path,
    data: SamplesLike | Data,
    *,
    engine: Engine | None = None,
) -> Agreement:
    """Compare two model files on samples that fit the reference; see `compare`.

    Args:
        reference: file of the float model, which runs on onnxruntime in this process.
        candidate: file of a model made from it. Integers as inputs and outputs are quantized and dequantized.
        data: the samples, or Data with how they are read; the reference completes chained inputs.
        engine: runs the candidate; None stands for onnxruntime in this process.

    Raises:
        ModelError: A file cannot be read or loaded.
        CandidateError: The outputs differ in name.
        DataError: The samples do not fit.
        EngineError: The engine fails.

    >>> import onnxq
    >>> compare_files("models/gru.onnx", "models/gru.onnx", onnxq.Data("models/data/calib.npz", limit=8)).worst_sqnr
    inf
    """
    with (
        open_pair(reference, candidate, data) as (floating, model, samples),
        staging(None) as folder,
        ExitStack() as sessions,
    ):
        views = ComparisonSpec.of(floating, model)

        def opened(spec: ComparisonSpec) -> ComparisonSession:
            session = spec.open(model) if engine is None else spec.open_on(engine, model, folder)
            sessions.callback(session.close)
            return session

        agreement = compare(ReferenceModel(floating, views), opened(views), samples)
        return with_own_choices(agreement, floating, opened, samples)


def agreement_of(
    names: Sequence[str],
    pairs: Iterable[tuple[Sequence[Any], Sequence[Any]]],
    risk: float = RISK,
    parts: Mapping[str, Sequence[OutputPart]] = MappingProxyType({}),
    files: Sequence[str] = (),
) -> Agreement:
    """Return the agreement of outputs that are already computed.

    Args:
        names: of the outputs.
        pairs: outputs of the reference and of the candidate, for each sample.
        risk: probability that a bound is wrong; see `alpha_spending`.
        parts: the parts that each output is concatenated from.
        files: of each sample, see `list_shared_files`; empty if each sample counts by itself.

    Raises:
        DataError: There is no sample.
    """
    tallies = [DetailedErrorAccumulator(parts.get(name, ())) for name in names]
    count = 0
    for expected, actual in pairs:
        count += 1
        for tally, float_output, output in zip(tallies, expected, actual, strict=True):
            tally.add_sample(float_output, output)
    if not count:
        raise DataError("there are no samples to compare the models on; give at least one")
    outputs = (_output_agreement(name, tally, risk, files) for name, tally in zip(names, tallies, strict=True))
    return Agreement(count, tuple(outputs), len(group_equal(files)))


def _output_agreement(name: str, tally: DetailedErrorAccumulator, risk: float, files: Sequence[str]) -> OutputAgreement:
    return OutputAgreement(
        name=name,
        sqnr=tally.sqnr if tally.is_float else None,
        agreement=tally.equal / tally.compared if tally.compared else None,
        largest_error=tally.largest,
        same_shapes=tally.same_shapes,
        finite=tally.finite,
        compared=tally.compared,
        bound=tally.bound(risk, files) if tally.is_float else None,
        worst=worst_places(tally.energies, tally.places),
        parts=tuple(replace(part, sqnr=sqnr_db(*sums)) for part, sums in tally.parts.items()),
        effective_labels=None if tally.is_float else tally.effective_labels(files),
        skipped=tally.skipped,
        is_compared=tally.elements > 0 or not tally.same_shapes,
    )
