"""What to try after a refusal, with figures of the run that was refused."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from onnxq.evaluation.goal import fault
from onnxq.planning.delivery import missing
from onnxq.report.figures import decibels
from onnxq.report.refusal import gains_nothing
from onnxq.report.report import Report

_TOLD = 3
# Less than that no goal is worth asking for.
_WORTH_ASKING = 5.0
# Options that a plan to carry out takes the place of.
_OF_SCHEMES = frozenset({"--search", "--accuracy", "--exclude", "--preset"})


@dataclass(frozen=True)
class Suggestion:
    """A command to try next.

    Attributes:
        options: what is said otherwise.
        command: the whole command line, where that of the run is known.
        why: what in this run speaks for it.
    """

    options: str
    command: str
    why: str


def suggestions(report: Report) -> tuple[Suggestion, ...]:
    """Return the three most promising commands after a refusal; none where the model was written."""
    if not report.fidelity.refusal:
        return ()
    found = islice((one for one in _options(report) if _fits(report.run.command, one[0])), _TOLD)
    return tuple(Suggestion(options, _command(report, options), why) for options, why in found)


def _fits(command: tuple[str, ...], options: str) -> bool:
    """Whether options mean anything in the command of the run."""
    option = options.split()[0]
    if any(word.partition("=")[0] == "--plan" for word in command):
        return option not in _OF_SCHEMES
    return option != "--search" or "train" not in command[1:2]


def _command(report: Report, options: str) -> str:
    """Return the command of the run with other options, each in the place of the one before."""
    if not report.run.command:
        return f"onnxq quantize ... {options}"
    words, new = [*report.run.command], shlex.split(options)
    # Patterns that are excluded add up.
    if len(new) == 2 and new[0] in words and new[0] != "--exclude":
        at = words.index(new[0])
        del words[at : at + 2]
    return shlex.join([*words, *new])


def _options(report: Report) -> Iterator[tuple[str, str]]:
    """Yield options with what speaks for them, the most promising first."""
    scores, coded, is_final = report.fidelity.scores, _is_coded(report), _is_final(report)
    worst = min(one.worst_sqnr for one in report.fidelity.agreements)
    if coded and gains_nothing(report):
        # A more faithful model would be of no more use.
        yield "--force", "the model is written as it is, neither smaller nor faster than the float model"
        return
    best, wanted = _best_measured(report), report.fidelity.wanted
    # One that has what is wanted was not trusted with it on other samples: to ask for as much again would help nothing.
    if not coded and scores is None and _WORTH_ASKING <= best < (math.inf if wanted is None else wanted):
        yield (
            f"--min-sqnr {math.floor(best)}",
            f"the most faithful plan with codes that was measured has {decibels(best)}",
        )
    if not report.search.measured:
        whole = f"with all that {report.plan.scheme} asks for the worst output has {decibels(worst)}"
        yield "--search fast", f"nothing was searched, and nodes that hurt can stay in float: {whole}"
    noisy = next((one for one in report.search.sensitivities if math.isfinite(one.sqnr)), None)
    # Where all went to float, leaving one more there changes nothing.
    if noisy is not None and coded:
        alone = f"alone as {noisy.mode} it leaves {decibels(noisy.sqnr)} at the worst output"
        yield f"--exclude {shlex.quote(noisy.node)}", f"{noisy.node} is the noisiest node: {alone}"
    bought = sum(one.after - one.before for one in report.encoding.gains if one.kept)
    spent = sum(one.seconds for one in report.encoding.gains)
    if not report.plan.thorough:
        known = f"what was tried bought {bought:.1f} dB in {spent:.0f} s" if report.encoding.gains else "none was tried"
        yield "--accuracy full", f"accuracy methods take more time and try each place by itself; {known}"
    if scores is not None and not is_final:
        yield f"--max-drop {_at_least(scores.drop):.3g}", f"{scores.name} fell by {scores.drop:.3g}"
    elif coded and not is_final and worst >= _WORTH_ASKING and math.isfinite(worst):
        yield f"--min-sqnr {math.floor(worst)}", f"this run reached {decibels(worst)} at the worst output"
    if coded and report.plan.scheme == "int8":
        yield (
            "--preset int8-storage",
            "weights alone are rounded and data stays float: as small as this one, "
            f"{report.size_ratio:.2f} of the size, at float speed",
        )
    if coded and not is_final:
        yield "--force", "the model is written as it is"
    elif not coded:
        told = "nothing is left in float for its noise, and the model is written as the scheme makes it"
        yield "--search off --force", told


def _is_final(report: Report) -> bool:
    """Whether neither a lower goal nor force would have the model written: it is unsound, or not exactly as asked."""
    by_metric = report.fidelity.scores is not None
    if any(fault(one, by_metric=by_metric) for one in report.fidelity.agreements):
        return True
    return "--exact" in report.run.command and bool(missing(report.encoding.delivered))


def _at_least(drop: float) -> float:
    """Return a drop in three digits, rounded up so that it is allowed."""
    if drop <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(drop)) - 2)
    return math.ceil(round(drop / unit, 3)) * unit


def _is_coded(report: Report) -> bool:
    """Whether the model that was judged has any codes."""
    return any(decision.weights for decision in report.plan.decisions)


def _best_measured(report: Report) -> float:
    """Return the SQNR in decibels of the most faithful plan with codes that was measured; NaN where there was none."""
    plans = (one for one in report.search.frontier if one.static or one.dynamic or one.weight_only)
    return max((one.sqnr for one in plans if one.sqnr is not None and math.isfinite(one.sqnr)), default=math.nan)
