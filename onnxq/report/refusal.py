"""When a report is refused: what it lacks of its goal or of any use, and what to do about it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from onnxq.errors import ModelError, OnnxqError
from onnxq.evaluation.agreement import OutputAgreement
from onnxq.evaluation.goal import Goal, fault, lost_score, shortfall, worst_output
from onnxq.planning.delivery import missing
from onnxq.report.report import Report
from onnxq.report.verdict import speed
from onnxq.runtime.targets import DEFAULT_TARGET

# Of a smaller model names and scales take more than codes save, and nobody counts its bytes.
_COUNTED_BYTES = 1 << 16


class FidelityError(OnnxqError):
    """The quantized model was verified, and is below the wanted fidelity or of no use; nothing was written.

    Attributes:
        report: what was decided and measured, with the refusal; it names no output, since none was written.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        fidelity = replace(report.fidelity, refusal=str(self))
        self.report = replace(report, files=replace(report.files, output=None), fidelity=fidelity)

    def __reduce__(self) -> tuple[type[FidelityError], tuple[str, Report]]:
        return type(self), (str(self), self.report)


def check_fidelity(report: Report, goal: Goal) -> None:
    """Refuse a model that is less faithful than the goal asks, unless that is forced.

    Without a metric each output is judged: floats by their SQNR, and labels and all else that is no float by the share
    of values that differ; see OutputAgreement.decibels.

    Raises:
        FidelityError: it is; or, forced or not, an output is not finite or of another shape, the model is the float
            model, or it lacks what an exact goal asks for.
        ModelError: no node is worth quantizing, so that the model is the float model.
    """
    min_sqnr = goal.min_sqnr
    agreement = report.agreement
    if told := fault(agreement, by_metric=report.fidelity.scores is not None):
        raise FidelityError(f"{told}; nothing was written", report)
    elsewhere = report.fidelity.elsewhere
    if elsewhere and (told := fault(elsewhere.agreement, by_metric=report.fidelity.scores is not None)):
        raise FidelityError(f"on {elsewhere.engine} {told}; nothing was written; see onnxq portability", report)
    if goal.exact and (told := missing(report.encoding.delivered)):
        raise FidelityError(f"{told}; expected all, exactly; nothing was written", report)
    if not any(decision.weights for decision in report.plan.decisions):
        if not _lacks_fidelity(report):
            reasons = "; ".join(reason for reason, _ in report.plan.left_in_float()[:3])
            raise ModelError(
                f"there is nothing to quantize in the model that pays: {reasons}; nothing was written; quantize it "
                "without a search if it has to be"
            )
        remedy = _noisiest(report) or "ask for a lower --min-sqnr, or take a preset of finer codes"
        if goal.force:
            remedy = "take the scheme as it is, without a search, if it has to be"
        raise FidelityError(
            f"nothing can be quantized that keeps {min_sqnr:g} dB at the worst output; nothing was written; "
            f"{_more(report)}{remedy}",
            report,
        )
    if goal.force:
        return
    if report.fidelity.scores is not None:
        if told := lost_score(report.fidelity.scores, goal):
            raise FidelityError(f"{told}; nothing was written; {_more(report)}allow more, or give more samples", report)
    elif worst := worst_output(agreement, goal):
        raise FidelityError(f"{shortfall(worst, goal)}; nothing was written; {_remedy(report, worst)}", report)
    elif elsewhere and (worst := worst_output(elsewhere.agreement, goal)):
        told, remedy = f"on {elsewhere.engine} {shortfall(worst, goal)}", "see where it differs with onnxq portability"
        if elsewhere.floats is not None and elsewhere.floats < min_sqnr:
            told = f"{told}, and the float model has {elsewhere.floats:.1f} dB there"
            remedy = "take an engine that computes in more bits, such as openvino-f32, or ask for a lower --min-sqnr"
        raise FidelityError(f"{told}; nothing was written; {remedy}", report)


def check_speed(report: Report, goal: Goal, *, keeps_up: bool) -> None:
    """Refuse a model that is not shown to be as fast as the float model, unless that is forced.

    Raises:
        FidelityError: it is not, although its weights are only stored in the float model as it was given.
    """
    if keeps_up or goal.force or report.latency is None:
        return
    raise FidelityError(
        f"{report.files.model}: the quantized model runs {speed(report.latency)}, expected not to be slower than "
        "float; nothing was written; keep the float model, give more time with --seconds on an idle machine, or write "
        "this one with --force",
        report,
    )


def check_gain(report: Report, goal: Goal) -> None:
    """Refuse a model that is of no use, unless that is forced or the goal asks for something else than size and speed.

    Raises:
        FidelityError: it is neither smaller than the float model nor shown to be faster.
    """
    if goal.force or goal.exact or goal.metric is not None or not gains_nothing(report):
        return
    timed = speed(report.latency) if report.latency is not None else "of a speed that was not measured"
    raise FidelityError(
        f"{report.files.model}: nothing is gained: the quantized model is {report.size_ratio:.2f} of the size and "
        f"{timed}, where a smaller or a faster one was expected; nothing was written; keep the float model, or write "
        "this one with --force",
        report,
    )


def gains_nothing(report: Report) -> bool:
    """Return whether a model is neither smaller than the float model nor shown to be faster where it could be."""
    if report.files.float_bytes < _COUNTED_BYTES or report.size_ratio < 1:
        return False
    if report.latency is None:
        # What another runtime gains, nobody has seen.
        return report.plan.target == DEFAULT_TARGET
    return report.latency.interval[0] <= 1


def _lacks_fidelity(report: Report) -> bool:
    """Return whether a model without codes came of noise, and not of what codes cost in time or that none fit.

    A search that weighs no times leaves its first plan only for noise, which may not have been told apart by nodes.
    """
    return bool(report.search.sensitivities) or (report.search.measured > 1 and not report.search.frontier)


def _noisiest(report: Report) -> str:
    """Name the nodes that were measured as the noisiest; an empty string where none was measured alone."""
    worst: dict[str, float] = {}
    for one in report.search.sensitivities:
        # A node is measured in each of its modes.
        worst.setdefault(one.node, one.sqnr)
    hurt = ", ".join(f"{node} ({sqnr:.1f} dB)" for node, sqnr in islice(worst.items(), 3))
    return f"the nodes that hurt most are {hurt}" if hurt else ""


def _remedy(report: Report, worst: OutputAgreement) -> str:
    """Say what to do about an output that is not faithful enough."""
    more = _more(report)
    if hurt := _noisiest(report):
        return f"{more}{hurt}"
    searched = more or ("" if report.search.measured else "let the search leave nodes out, ")
    metric = "judge by --metric and --max-drop, " if worst.sqnr is None else ""
    return f"{searched}{metric}ask for a lower --min-sqnr, or --force it"


def _more(report: Report) -> str:
    """Ask for a larger budget where it ended the search or left it out."""
    return f"allow the search more than {report.search.limit}, " if report.search.limit else ""
