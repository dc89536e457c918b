"""What came of a run in one sentence."""

from __future__ import annotations

import math

from onnxq.judging.agreement import Agreement
from onnxq.judging.gate import Judged, worst_output
from onnxq.judging.goal import Goal
from onnxq.judging.latency import Latency
from onnxq.report.figures import counted, places
from onnxq.report.parts import Fidelity, ModelFiles, Performance, Samples

# Labels of which any differs are told as no more, as rounding might make them all equal.
_MOST_OF_LABELS = 0.999
# A line of a terminal holds no more; the report has all.
_SHOWN_PLACES = 6


def verdict(files: ModelFiles, samples: Samples, fidelity: Fidelity, performance: Performance) -> str:
    """Return the first line of all that is told: how fast, how small and how faithful, or why it was refused."""
    if fidelity.refusal:
        return f"Refused: {fidelity.refusal}"
    timed = [] if performance.latency is None else [speed(performance.latency)]
    below = any(worst_output(one, Goal(fidelity.wanted)) for one in fidelity.agreements) if fidelity.wanted else False
    word = f"Forced, below the {fidelity.wanted:g} dB wanted" if below else "Verified"
    return f"{word}: {', '.join([*timed, f'{files.size_ratio:.2f} of the size', _fidelity(samples, fidelity)])}"


def judges(samples: Samples, fidelity: Fidelity) -> str:
    """Say by how many samples a model was judged, and how many of these had a part in making it."""
    judged = samples.judged
    if judged is None:
        return counted(fidelity.agreement.samples, fidelity.agreement.files)
    by_these = counted(judged.samples, judged.files)
    if not judged.seen:
        later = f", before its ranges became those of all {samples.refitted}" if samples.refitted else ""
        return f"{by_these} it had not seen{later}"
    if judged.seen == judged.samples:
        return f"{by_these} that it had seen"
    return f"{by_these}, {judged.seen} of which it had seen"


def which(judged: Judged) -> str:
    """Say which of the given samples judged a model; an empty string where that is not known."""
    if not judged.places:
        return ""
    given = "those given to judge by" if judged.apart else "the samples given"
    return f"{places(judged.places, _SHOWN_PLACES)} of {given}, counted from 0"


def speed(latency: Latency) -> str:
    """Say how fast a model is beside the float model, and how sure that is."""
    if not latency.is_bounded:
        rounds = "1 round of timing does" if latency.rounds == 1 else f"{latency.rounds} rounds of timing do"
        return f"of a speed that {rounds} not tell"
    low, high = latency.interval
    # A speed that may as well be 1 is no speed.
    what = f"{latency.speed:.2f}x as fast" if latency.significant else "as fast as float, as far as could be measured"
    return f"{what} ({low:.2f}-{high:.2f})"


def told_equal(agreement: Agreement) -> str:
    """Say how much is equal of outputs that differ by no more than may be chance."""
    share = agreement.equal_labels
    return "equal outputs" if share == 1.0 else f"{min(share, _MOST_OF_LABELS):.1%} equal labels"


def _fidelity(samples: Samples, fidelity: Fidelity) -> str:
    """Say what the outputs, or the user's metric, are, and on which samples."""
    worst, scores = fidelity.agreement.worst_sqnr, fidelity.scores
    if scores is not None:
        what = f"{scores.name} {scores.reference:.4g} -> {scores.candidate:.4g}"
    elif math.isinf(worst) and worst > 0:
        what = told_equal(fidelity.agreement)
    else:
        what = f"{worst:.0f} dB"
    return f"{what} on {judges(samples, fidelity)}"
