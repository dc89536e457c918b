"""Refusals, why a model is not faster, and what to try next."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from onnxq.config.scheme import Mode
from onnxq.errors import ModelError, OnnxqError, names_options
from onnxq.evaluation.agreement import OutputAgreement
from onnxq.evaluation.goal import Goal, fault, lacking_bound, lost_score, shortfall, worst_output
from onnxq.numerics.affine import decibels
from onnxq.ops import OPERATORS, Role
from onnxq.planning.delivery import missing
from onnxq.planning.plan import Decision
from onnxq.planning.weights import AT_LOAD
from onnxq.report.formatting import plural, size
from onnxq.report.report import Report, speed
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.search.bit_allocation import CERTIFICATE_BYTES

# In smaller models, names and scales take more bytes than quantized values save, and its size does not matter.
_COUNTED_BYTES = 1 << 16


class AccuracyError(OnnxqError):
    """The verified model misses the wanted accuracy or is of no use; nothing was written.

    Attributes:
        reason: what the model misses, and what was expected.
        remedy: what to try; empty where there is nothing.
        report: decisions and measurements, with the refusal; `output` is None.

    >>> import onnxq
    >>> onnxq.quantize("model.onnx", "data/", goal=60)  # doctest: +SKIP
    Traceback (most recent call last):
    onnxq.report.refusal.AccuracyError: output logits has 38.1 dB, expected 60 dB or more; nothing was written; ...
    """

    def __init__(self, reason: str, report: Report, remedy: str = "") -> None:
        self.reason, self.remedy = _to_caller(reason), _to_caller(remedy)
        super().__init__("; ".join(filter(None, (self.reason, "nothing was written", self.remedy))))
        accuracy = replace(report.accuracy, refusal=str(self))
        self.report = replace(report, files=replace(report.files, output=None, data=None), accuracy=accuracy)

    def __reduce__(self) -> tuple[type[AccuracyError], tuple[str, Report, str]]:
        return type(self), (self.reason, self.report, self.remedy)


# Arguments in Python of options that messages name.
_IN_PYTHON = {
    "--search fast": 'budget="fast"',
    "--search full": 'budget="full"',
    "--search off": 'budget="off"',
    "--metric and --max-drop": "Goal(metric=..., max_drop=...)",
    "--min-sqnr": "goal=",
    "--max-drop": "max_drop=",
    "--latency-seconds": "latency_seconds=",
    "--time-limit ": "time_limit=",
    "--max-size": "max_size=",
    "--prefer size": 'Goal(prefer="size")',
    "--force": "Goal(force=True)",
}


def _to_caller(message: str) -> str:
    """Name arguments of Python instead of options, unless a command of onnxq runs."""
    if not names_options.get():
        for option, argument in _IN_PYTHON.items():
            message = message.replace(option, argument)
    return message


Refused = Iterator[tuple[str, str]]
"""Why a model is refused: what it lacks, and what to try."""


def check(report: Report, goal: Goal, *, searched: bool, keeps_up: bool) -> None:
    """Refuse a model that misses the goal, or is of no use.

    Without a metric, the SQNR of each float output counts; for other outputs, the share of values that differ. See
    `OutputAgreement.decibels`.

    Args:
        report: of the model.
        goal: what is required. A forced goal still refuses a model that is too large, has invalid outputs, lacks the
            bits of an exact goal, or has nothing quantized.
        searched: whether a search was asked for. Other models are wanted whatever they gain.
        keeps_up: whether the model is shown to be as fast as the float model.

    Raises:
        AccuracyError: The model is refused.
        ModelError: No node is worth quantizing, so the model would be the float model.
    """
    for reason, remedy in _refusals(report, goal, searched=searched, keeps_up=keeps_up):
        raise AccuracyError(reason, report, remedy)


def _refusals(report: Report, goal: Goal, *, searched: bool, keeps_up: bool) -> Refused:
    yield from _too_large(report, goal)
    yield from _invalid(report, goal)
    if not _is_quantized(report):
        yield _nothing_quantized(report, goal)
    if goal.force:
        return
    yield from _inaccurate(report, goal)
    if searched:
        yield from _uncertain(report, goal)
        yield from _slow(report, keeps_up=keeps_up)
        yield from _useless(report, goal)


def _too_large(report: Report, goal: Goal) -> Refused:
    files, most = report.files, report.search.max_size
    if most is not None and files.bytes > most:
        what = "smallest model found that keeps the goal" if goal.prefers_size else "smallest model"
        reason = f"{files.model}: the {what} has {size(files.bytes)}, expected {size(most)} or less"
        yield reason, f"raise --max-size to {_share_above(report.size_ratio)}"


def _invalid(report: Report, goal: Goal) -> Refused:
    """Yield outputs that are not finite or of another shape, and fewer bits than an exact goal requires."""
    by_metric = report.accuracy.scores is not None
    if message := fault(report.agreement, by_metric=by_metric):
        yield message, ""
    for elsewhere in report.accuracy.on_engines:
        if message := fault(elsewhere.agreement, by_metric=by_metric):
            remedy = "see what the float model does there with onnxq compare --engine"
            yield f"on {elsewhere.engine} {message}", remedy
    if goal.exact and (message := missing(report.encoding.delivered)):
        yield f"{message}; expected all, exactly", ""


def _nothing_quantized(report: Report, goal: Goal) -> tuple[str, str]:
    """Return why no node is quantized if none is accurate enough; raise an error if none is worth it."""
    # A search without times leaves its first plan only for its error, even if no node was measured alone.
    search, scores = report.search, report.accuracy.scores
    if not search.sensitivities and (search.measured < 2 or search.frontier):
        reasons = "; ".join(reason for reason, _ in report.plan.left_in_float()[:3])
        raise ModelError(
            _to_caller(f"nothing in the model is worth quantizing: {reasons}; --search off quantizes it anyway")
        )
    kept = f"{goal.min_sqnr:g} dB at the worst output" if scores is None else scores.name
    lower = "lower --min-sqnr" if scores is None else "raise --max-drop"
    remedy = _most_sensitive(report) or f"{lower}, or use a preset of more bits"
    if goal.force:
        remedy = "--search off takes the scheme as it is"
    return f"no quantized plan keeps {kept}", _more(report, remedy)


def _inaccurate(report: Report, goal: Goal) -> Refused:
    if (scores := report.accuracy.scores) is not None:
        if message := lost_score(scores, goal):
            remedy = "raise --max-drop, or give more samples"
            if goal.max_size is not None and not goal.prefers_size:
                remedy = "raise --max-size or --max-drop; --prefer size finds the smallest file that is good enough"
            yield message, _more(report, remedy)
        return
    if worst := worst_output(report.agreement, goal):
        larger = _larger_size(report)
        remedy = f"raise --max-size to about {larger}, or lower --min-sqnr" if larger else _remedy(report, worst)
        yield shortfall(worst, goal), remedy
    for elsewhere in report.accuracy.on_engines:
        if worst := worst_output(elsewhere.agreement, goal):
            message = f"on {elsewhere.engine} {shortfall(worst, goal)}"
            remedy = "onnxq verify --engine names the first node that differs in a model written with --force"
            if elsewhere.floats is not None and elsewhere.floats < goal.min_sqnr:
                message = f"{message}, and the float model has {decibels(elsewhere.floats)} there"
                remedy = "use an engine that computes in more bits, such as openvino-f32, or lower --min-sqnr"
            yield message, remedy


def _uncertain(report: Report, goal: Goal) -> Refused:
    """Yield that stored weights are not shown to be half as good on other samples."""
    if report.accuracy.wanted is None or report.plan.decodes:
        return
    if (lacks := lacking_bound(report.agreement, goal)) is not None:
        weakest = lacks[0]
        yield (
            f"with compressed weights alone, {weakest.label} is only shown to have {decibels(weakest.bound)} or more "
            f"on other samples, expected at least half of {goal.min_sqnr:g} dB",
            "give more samples, or use --force",
        )


def _slow(report: Report, *, keeps_up: bool) -> Refused:
    if not keeps_up and report.latency is not None:
        reason = f"the quantized model runs {speed(report.latency)}, expected no slower than float"
        yield f"{report.files.model}: {reason}", "use an idle machine and more --latency-seconds, or --force"


def _useless(report: Report, goal: Goal) -> Refused:
    """Yield that a model is neither smaller nor shown to be faster, unless the goal is exact or has a metric."""
    if not goal.exact and goal.metric is None and _gains_nothing(report):
        timed = speed(report.latency) if report.latency is not None else "of unmeasured speed"
        reason = f"the quantized model is {report.size_ratio:.2f} of the size and {timed}, expected smaller or faster"
        yield f"{report.files.model}: {reason}", "keep the float model, or use --force"


def _share_above(share: float) -> str:
    """Return a share of two decimals that is not below a given one.

    >>> _share_above(0.1301)
    '0.14'
    """
    return f"{math.ceil(share * 100) / 100:.2f}"


def _larger_size(report: Report) -> str:
    """Return the nearest share that is expected to have the wanted SQNR; "" if none does, or nothing is limited."""
    wanted, files = report.accuracy.wanted, report.files
    if wanted is None or report.search.max_size is None:
        return ""
    for point in report.search.sizes:
        if point.sqnr is not None and point.sqnr >= wanted and point.bytes > files.bytes:
            return _share_above((point.bytes + CERTIFICATE_BYTES) / files.float_bytes)
    return ""


def _gains_nothing(report: Report) -> bool:
    """Return whether a model is neither smaller than the float model nor shown to be faster, if it could be."""
    if report.files.float_bytes < _COUNTED_BYTES or report.size_ratio < 1:
        return False
    if report.latency is None:
        # The gain on other runtimes was not measured.
        return report.plan.target == DEFAULT_TARGET
    return report.latency.interval[0] <= 1


def _most_sensitive(report: Report) -> str:
    """Name the nodes with the lowest SQNR; "" if none was measured alone."""
    worst: dict[str, float] = {}
    for sensitivity in report.search.sensitivities:
        # A node is measured in each of its modes.
        worst.setdefault(sensitivity.node, sensitivity.sqnr)
    hurt = ", ".join(f"{node} ({decibels(sqnr)})" for node, sqnr in list(worst.items())[:3])
    return f"the nodes with the lowest SQNR are {hurt}" if hurt else ""


def _remedy(report: Report, worst: OutputAgreement) -> str:
    if hurt := _most_sensitive(report):
        return _more(report, hurt, "; ")
    search, remedies = report.search, list[str]()
    if not (search.longer or search.measured):
        remedies.append("let --search fast keep nodes in float")
    if worst.sqnr is None:
        remedies.append("evaluate with --metric and --max-drop")
    if worst.decibels < _WORTH_ASKING:
        remedies.append("use a preset of more bits, or one that quantizes weights alone, such as int8-storage")
    else:
        remedies.append("lower --min-sqnr, or write it with --force")
    return _more(report, ", ".join(remedies))


def _more(report: Report, remedy: str, separator: str = ", ") -> str:
    """Return a remedy after one for more time, if a limit ended or prevented the search."""
    return f"take {report.search.longer}{separator}{remedy}" if report.search.longer else remedy


# Suggestions, with figures of the run.

# Decibels. A lower goal is not worth suggesting.
_WORTH_ASKING = 5.0
# Options that a given plan replaces.
_OF_SCHEMES = frozenset({"--search", "--accuracy", "--exclude", "--preset"})


@dataclass(frozen=True)
class Suggestion:
    """A command to try next.

    Attributes:
        options: to add or change.
        command: the whole command line, as far as the run's is known.
        why: measurement of this run that supports it.
    """

    options: str
    command: str
    why: str

    @classmethod
    def of(cls, report: Report, options: str, why: str) -> Suggestion:
        """Return the run's command with options added, or in place of the same ones."""
        if not report.run.command:
            return cls(options, f"onnxq quantize ... {options}", why)
        words, new = [*report.run.command], shlex.split(options)
        # Several --exclude options add up.
        if len(new) == 2 and new[0] in words and new[0] != "--exclude":
            at = words.index(new[0])
            del words[at : at + 2]
        return cls(options, shlex.join([*words, *new]), why)


# As many suggestions as are shown after a refusal, and for a written model.
_AFTER_REFUSAL, _FOR_WRITTEN = 3, 2


def suggestions(report: Report) -> tuple[Suggestion, ...]:
    """Return the most promising commands after a refusal, or commands that may improve a written model.

    Each has the figure of this run that supports it.
    """
    refused = bool(report.accuracy.refusal)
    pairs = _after_refusal(report) if refused else _improvements(report)
    fitting = (Suggestion.of(report, *pair) for pair in pairs if _fits(report.run.command, pair[0]))
    return tuple(fitting)[: _AFTER_REFUSAL if refused else _FOR_WRITTEN]


def _fits(command: tuple[str, ...], options: str) -> bool:
    """Return whether options have an effect on the run's command."""
    option = options.split()[0]
    if any(word.partition("=")[0] == "--plan" for word in command):
        return option not in _OF_SCHEMES
    return option != "--search" or "train" not in command[1:2]


def _after_refusal(report: Report) -> Iterator[tuple[str, str]]:
    """Yield options with their reasons, the most promising first."""
    scores, quantized, is_final = report.accuracy.scores, _is_quantized(report), _is_final(report)
    worst = min(agreement.worst_sqnr for agreement in report.accuracy.agreements)
    most = report.search.max_size
    if most is not None and report.files.bytes > most:
        # More accuracy would not make it smaller.
        yield f"--max-size {_share_above(report.size_ratio)}", f"this run came to {size(report.files.bytes)}"
        return
    if larger := _larger_size(report):
        yield f"--max-size {larger}", f"this size is expected to have {decibels(report.accuracy.wanted or 0.0)}"
    if quantized and _gains_nothing(report):
        # A more accurate model would gain nothing either.
        yield "--force", "the model is written as it is, neither smaller nor faster than the float model"
        return
    if report.search.longer:
        yield report.search.longer, "time ran out before all plans were tried"
    best, wanted = _best_measured(report), report.accuracy.wanted
    # A plan at the wanted SQNR had a lower bound for other samples: asking for as much again would not help.
    if not quantized and scores is None and _WORTH_ASKING <= best < (math.inf if wanted is None else wanted):
        yield (
            f"--min-sqnr {math.floor(best)}",
            f"the most accurate quantized plan that was measured has {decibels(best)}",
        )
    if not report.search.measured:
        whole = f"with all of {report.plan.scheme}, the worst output has {decibels(worst)}"
        yield "--search fast", f"a search can leave nodes with low SQNR in float, and this run had none: {whole}"
    worst_node = next((node for node in report.search.sensitivities if math.isfinite(node.sqnr)), None)
    # If all nodes are float, excluding one more changes nothing. In a limited size, it takes bits from the others.
    if worst_node is not None and quantized and most is None:
        alone = f"quantized alone, it leaves {decibels(worst_node.sqnr)} at the worst output"
        yield (
            f"--exclude {shlex.quote(worst_node.node)}",
            f"{worst_node.node} has the highest quantization error: {alone}",
        )
    bought = sum(gain.after - gain.before for gain in report.encoding.gains if gain.kept)
    spent = sum(gain.seconds for gain in report.encoding.gains)
    if not report.plan.thorough:
        effect = f"this run gained {bought:.1f} dB in {spent:.0f} s" if report.encoding.gains else "this run tried none"
        yield "--accuracy full", f"accuracy methods take longer and decide for each weight; {effect}"
    if scores is not None and not is_final and not scores.allowed_by(report.accuracy.max_drop):
        yield f"--max-drop {_at_least(scores.drop):.3g}", f"{scores.name} fell by {scores.drop:.3g}"
    elif scores is None and quantized and not is_final and worst >= _WORTH_ASKING and math.isfinite(worst):
        yield f"--min-sqnr {math.floor(worst)}", f"this run reached {decibels(worst)} at the worst output"
    if quantized and report.plan.scheme == "int8":
        yield (
            "--preset int8-storage",
            "only weights are quantized and activations stay float: as small as this one, "
            f"{report.size_ratio:.2f} of the size, at float speed",
        )
    if quantized and not is_final and (scores is not None or worst >= _WORTH_ASKING):
        yield "--force", "the model is written as it is"
    elif not quantized:
        reason = "the scheme is applied unchanged, with no node left in float for its quantization error"
        yield "--search off --force", reason


def _is_final(report: Report) -> bool:
    """Return whether neither a lower goal nor force helps: an output is invalid, or an exact goal is missed."""
    by_metric = report.accuracy.scores is not None
    if any(fault(agreement, by_metric=by_metric) for agreement in report.accuracy.agreements):
        return True
    return "--exact" in report.run.command and bool(missing(report.encoding.delivered))


def _at_least(drop: float) -> float:
    """Return a drop in three digits, rounded up so that it is allowed."""
    if drop <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(drop)) - 2)
    return math.ceil(round(drop / unit, 3)) * unit


def _is_quantized(report: Report) -> bool:
    return any(decision.weights for decision in report.plan.decisions)


def _best_measured(report: Report) -> float:
    """Return the SQNR in decibels of the most accurate quantized plan that was measured; NaN if there is none."""
    plans = (point for point in report.search.frontier if point.static or point.dynamic or point.weight_only)
    return max((plan.sqnr for plan in plans if plan.sqnr is not None and math.isfinite(plan.sqnr)), default=math.nan)


# Why a written model is not faster, and what to try

# Share of the bytes of a model.
_WORTH_STRIPPING = 0.01
# A plan must be this much faster than the written one to be suggested.
_WORTH_TRYING = 1.05
# Decibels. A lower goal is not worth suggesting.
_LEAST_GOAL = 10.0


def why_not_faster(report: Report) -> str:
    """Return in a sentence which nodes in float take most time, and why they are in float; "" if there are none.

    Also "" if the bits of weights were chosen for a size: such a scheme multiplies no integers.
    """
    if report.search.sizes:
        return ""
    times = {time.node: time.milliseconds for time in report.performance.times}
    groups = defaultdict[str, list[Decision]](list)
    for decision in report.plan.decisions:
        if decision.mode not in (Mode.STATIC, Mode.DYNAMIC) and _is_heavy(decision):
            groups[decision.reason.rpartition(AT_LOAD)[2]].append(decision)
    if not groups:
        return ""

    def spent(held: Sequence[Decision]) -> float:
        return sum(times.get(decision.node, 0.0) for decision in held)

    reason, held = max(groups.items(), key=lambda item: (spent(item[1]), len(item[1])))
    total = sum(times.values())
    share = f", with {spent(held) / total:.0%} of the time," if total else ""
    verb = "does" if len(held) == 1 else "do"
    operators = name_operators(Counter(decision.op_type for decision in held))
    return f"{operators}{share} {verb} not run as integers ({_of_each(reason) if len(held) > 1 else reason})"


def _of_each(reason: str) -> str:
    """Return the reason of one node as that of several.

    >>> _of_each("its weight is empty")
    'their weight is empty'
    """
    return re.sub(r"\bits\b", "their", reason)


def _is_heavy(decision: Decision) -> bool:
    row = OPERATORS.get(("", decision.op_type))
    return row is not None and row.role is Role.COMPUTE


def name_operators(counts: Counter[str]) -> str:
    """Return the number of nodes per operator, or only the total for more than two operators.

    >>> name_operators(Counter(Erf=12)), name_operators(Counter(Mul=2, Add=3)), name_operators(Counter("abc"))
    ('12 Erf', '3 Add, 2 Mul', '3 nodes')
    """
    if len(counts) > 2:
        return plural(counts.total(), "node")
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


# Presets whose formats have integer kernels on this target alone.
_FOR_NPUS = {"int4-int8-data": "4-bit weights", "int8-int16-data": "16-bit activations"}
_NPU = "qnn"


def _improvements(report: Report) -> Iterator[tuple[str, str]]:
    formats, frontier = _FOR_NPUS.get(report.plan.scheme), report.search.frontier
    if formats is not None and report.plan.target != _NPU:
        yield f"--target {_NPU}", f"{report.plan.target} has no integer kernels for {formats}, and NPUs have"
    taken, wanted = next((point.milliseconds for point in frontier if point.chosen), math.inf), report.accuracy.wanted
    faster = (point for point in frontier if point.milliseconds * _WORTH_TRYING <= taken)
    best = max(((point.sqnr or 0.0, point.milliseconds) for point in faster), default=(0.0, 0.0))
    if wanted is not None and _LEAST_GOAL <= best[0] < wanted:
        gain = f"a plan of {decibels(best[0])} is about {taken / best[1]:.2f}x as fast as this one"
        yield f"--min-sqnr {math.floor(best[0])}", gain
    is_searched = bool(report.search.sensitivities) and not report.search.sizes
    if is_searched and not report.plan.thorough and report.accuracy.wanted is not None:
        yield "--accuracy full", "with a lower error, more nodes may run as integers or weights may take fewer bits"
    if report.files.metadata_bytes >= _WORTH_STRIPPING * report.files.bytes:
        yield "--strip-metadata", f"the exporter's metadata takes {size(report.files.metadata_bytes)}"
