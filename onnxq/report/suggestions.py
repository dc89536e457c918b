"""What to try after a refusal, with figures of the run that was refused."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from onnxq.report.figures import decibels
from onnxq.report.report import Report

_TOLD = 3
# Less than that no goal is worth asking for.
_WORTH_ASKING = 5.0


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
    found = islice(_options(report), _TOLD)
    return tuple(Suggestion(options, _command(report, options), why) for options, why in found)


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
    scores, worst = report.fidelity.scores, report.agreement.worst_sqnr
    if not report.search.measured:
        whole = f"with all that {report.plan.scheme} asks for the worst output has {decibels(worst)}"
        yield "--search fast", f"nothing was searched, and nodes that hurt can stay in float: {whole}"
    noisy = next((one for one in report.search.sensitivities if math.isfinite(one.sqnr)), None)
    if noisy is not None:
        alone = f"alone as {noisy.mode} it leaves {decibels(noisy.sqnr)} at the worst output"
        yield f"--exclude {shlex.quote(noisy.node)}", f"{noisy.node} is the noisiest node: {alone}"
    bought = sum(one.after - one.before for one in report.encoding.gains if one.kept)
    spent = sum(one.seconds for one in report.encoding.gains)
    if not report.plan.thorough:
        known = f"what was tried bought {bought:.1f} dB in {spent:.0f} s" if report.encoding.gains else "none was tried"
        yield "--accuracy full", f"accuracy methods take more time and try each place by itself; {known}"
    if scores is not None:
        yield f"--max-drop {max(scores.drop, 0.0):.3g}", f"{scores.name} fell by {scores.drop:.3g}"
    elif worst >= _WORTH_ASKING and math.isfinite(worst):
        yield f"--min-sqnr {math.floor(worst)}", f"this run reached {decibels(worst)} at the worst output"
    if report.plan.scheme == "int8":
        yield (
            "--preset int8-storage",
            "weights alone are rounded and data stays float: as small as this one, "
            f"{report.size_ratio:.2f} of the size, at float speed",
        )
    yield "--force", "the model is written as it is"
