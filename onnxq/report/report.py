"""The report: everything that was decided and measured, its verdict in one sentence, and its JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxq.certificate.certificate import Certificate
from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.errors import DataError, check_path
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import EvaluationSplit, Goal, worst_output
from onnxq.evaluation.latency import NOT_SLOWER, Latency
from onnxq.numerics.affine import decibels
from onnxq.numerics.formats import format_named
from onnxq.passes.constants import FixInitializers
from onnxq.planning.plan import Plan
from onnxq.report.formatting import counted, duration, places, plural, share, shortened, size
from onnxq.report.parts import Accuracy, Encoding, ModelFiles, Performance, Run, Samples, Search
from onnxq.search.results import TRAINING
from onnxq.system.html_table import html_table
from onnxq.system.publish import write_text
from onnxq.system.records import RecordError, read_record, to_plain

# If any label differs, at most this share is shown as equal, as rounding might show 100 %.
_MOST_OF_LABELS = 0.999
EQUAL = "equal outputs"
"""The text if no output of the model differs."""
# A line of a terminal holds no more; the report has all.
_SHOWN_PLACES, _SHOWN_NAMES = 6, 3
# Bounds of so few samples hold in about 90 % and not 95 %, see benchmarks/coverage_of_bounds.py.
_FEW = 3


def which(split: EvaluationSplit) -> str:
    """Return the indices of the samples that a model was evaluated on; "" if they are not known."""
    if not split.places:
        return ""
    source = "the validation samples" if split.apart else "the samples given"
    return f"{places(split.places, _SHOWN_PLACES)} of {source}, counted from 0"


def speed(latency: Latency) -> str:
    """Return the speed beside the float model with its interval."""
    if not latency.is_bounded:
        rounds = "1 round of timing is" if latency.rounds == 1 else f"{latency.rounds} rounds of timing are"
        return f"of unknown speed ({rounds} too few)"
    low, high = latency.interval
    if not latency.significant and low < NOT_SLOWER:
        return f"between {low:.2f}x and {high:.2f}x as fast"
    # A speed that may be 1 is not shown as a number.
    what = f"{latency.speed:.2f}x as fast" if latency.significant else "as fast as float"
    return f"{what} ({low:.2f}-{high:.2f})"


def describe_equality(agreement: Agreement) -> str:
    """Return how much of outputs is equal, if they differ by no more than chance."""
    if not any(output.is_compared for output in agreement.outputs):
        return "no comparable output"
    share = agreement.equal_labels
    if share < 1.0:
        return f"{min(share, _MOST_OF_LABELS):.1%} equal labels"
    return "equal in all compared outputs" if agreement.decided or agreement.chosen else EQUAL


def compared(agreement: Agreement) -> str:
    """Return which outputs were not compared as users get them, or not at all; "" for most models."""
    none = [output.name for output in agreement.outputs if not output.is_compared]
    some = [output.name for output in agreement.outputs if output.skipped and output.is_compared]
    descriptions = (
        (agreement.chosen, "compared under the float model's choices"),
        (agreement.decided, "evaluated only by the scores that decide"),
        (agreement.free_choices, "compared under each model's own choices"),
        (none, "not compared, because the float model's values are not finite"),
        (some, "compared where the float model is finite"),
    )
    text = "".join(
        f"; {_listed(names)} {'is' if len(names) == 1 else 'are'} {how}" for names, how in descriptions if names
    )
    own = [f"{output.name} {own_choice(output)}" for output in agreement.own_choices]
    return text + (f"; with the choices of this model {_listed(own)}" if own else "")


def own_choice(output: OutputAgreement) -> str:
    """Return how well an output agrees with the model's own choices.

    >>> own_choice(OutputAgreement("y", 23.0, None, 0.1, True, True, 0))
    'has 23.0 dB'
    """
    if output.sqnr is not None:
        return f"has {decibels(output.sqnr)}"
    return f"is equal in {min(output.agreement or 0.0, _MOST_OF_LABELS):.1%}"


def _listed(names: Sequence[str]) -> str:
    """Return some names, and the number of others.

    >>> _listed("a"), _listed("abc"), _listed("abcde")
    ('a', 'a, b, c', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more}"


# The report and its JSON.

VERSION = 3
"""Of the JSON; a report of another version is refused, as its keys differ."""

# Figures that pipelines read first; they follow from the others.
_SUMMARY = ("size_ratio", "worst_sqnr", "speed", "summary")


@dataclass(frozen=True, repr=False)
class Report:
    """Everything that was decided and measured; each part documents its fields.

    Attributes:
        files: names, sizes and digests of the models.
        plan: decisions for all nodes.
        samples: numbers of samples, and warnings about them.
        accuracy: outputs beside the float model's, with bounds in decibels.
        performance: latency in seconds and runtime.
        search: evaluated plans and sensitivities.
        encoding: calibration method, accuracy methods and their gains.
        run: command line, versions and seconds of each step.
        certificate: what was written into the model; None if it was left out.

    >>> import onnxq
    >>> onnxq.load_report("report.json").agreement.worst_sqnr  # doctest: +SKIP
    38.1
    """

    files: ModelFiles
    plan: Plan
    samples: Samples
    accuracy: Accuracy
    performance: Performance
    search: Search
    encoding: Encoding
    run: Run
    certificate: Certificate | None = None

    def __repr__(self) -> str:
        return f"Report({self.verdict}; {self.plan})"

    def _repr_html_(self) -> str:
        rows = [(output.name, decibels(output.sqnr), share(output.agreement)) for output in self.agreement.outputs]
        return html_table(self.verdict, ("output", "SQNR", "agreement"), rows) + self.plan._repr_html_()

    @property
    def output(self) -> str | None:
        """The file that was written, or None."""
        return self.files.output

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        return _verdict(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Limits of the figures, and the user's own passes that failed, in sentences."""
        scores = self.accuracy.scores
        metric = filter(None, (scores.doubt, scores.warning)) if scores is not None else ()
        failed = (f"skipped, as {what}" for applied in self.run.own_passes for _, what in applied.failed)
        return (*self.samples.warnings, *metric, *failed)

    @property
    def evaluated_on(self) -> str:
        """On how many samples it was evaluated, and how many of these the search used, in words."""
        split = self.samples.split
        if split is None:
            return counted(self.agreement.samples, self.agreement.files)
        if self.samples.generated:
            return counted(split.samples, split.files).replace("sample", "generated sample")
        return _evaluation_samples(split)

    @property
    def size_ratio(self) -> float:
        """Size of the quantized model over the size of the float model."""
        return self.files.size_ratio

    @property
    def agreement(self) -> Agreement:
        """How well the outputs agree with the float model's."""
        return self.accuracy.agreement

    @property
    def latency(self) -> Latency | None:
        """Latency beside the float model; None if not measured."""
        return self.performance.latency

    def to_json(self) -> str:
        """Return the report as JSON, with the most important figures first; `load_report` reads it.

        Infinities and NaN, which JSON lacks, are the words Infinity, -Infinity and NaN.
        """
        rows = [{"name": row.name, "text": row.text} for row in summary_rows(self)]
        summary = {
            "version": VERSION,
            "size_ratio": self.size_ratio,
            "worst_sqnr": self.agreement.worst_sqnr,
            "speed": self.latency.speed if self.latency is not None else None,
            "summary": rows,
        }
        return json.dumps({**to_plain(summary), **to_plain(self)}, indent=2)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON.

        Raises:
            OutputError: The file cannot be written.
        """
        write_text(path, self.to_json() + "\n", "report")


def load_report(path: str | Path) -> Report:
    """Read a file that `Report.save` wrote.

    Args:
        path: JSON file.

    Raises:
        DataError: The file cannot be read, is no report, or has another version.

    >>> load_report("report.json").agreement.worst_sqnr  # doctest: +SKIP
    38.1
    """
    check_path(path, "the file of a report")
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise DataError(f"report {path} cannot be read: {reason}") from reason
    if not isinstance(document, dict) or "plan" not in document:
        raise DataError(f"{path} is not a report of onnxq; expected what quantize --report writes")
    if (version := document.get("version")) != VERSION:
        newer = isinstance(version, int) and version > VERSION
        writer = "a newer onnxq" if newer else "an older onnxq"
        raise DataError(f"report {path} is of {writer} (version {version}, expected {VERSION}); quantize again")
    fields = {key: value for key, value in document.items() if key not in ("version", *_SUMMARY)}
    try:
        return read_record(Report, "the report", fields)
    except RecordError as reason:
        raise DataError(f"report {path}: {reason}") from reason


# The verdict.

# Decibels. A bound so far below the measured SQNR is shown beside it, even if it reaches the goal.
_FAR_BELOW = 10.0


def _verdict(report: Report) -> str:
    """Return the speed, size and accuracy in one sentence, or why the model was refused."""
    accuracy, latency = report.accuracy, report.latency
    if accuracy.refusal:
        return f"Refused: {accuracy.refusal}"
    timed = [] if latency is None else [speed(latency)]
    if report.performance.runs_as_float:
        timed = ["as fast as float, whose kernels it runs"]
    goal = Goal(accuracy.wanted) if accuracy.wanted else None
    below = goal is not None and any(worst_output(agreement, goal) for agreement in accuracy.agreements)
    word = "Verified"
    if below:
        word = f"Forced, below the {accuracy.wanted:g} dB wanted"
    elif latency is not None and latency.is_bounded and latency.interval[1] < NOT_SLOWER:
        # A search or a refusal would have prevented it, but not for a given plan, a scheme as it is, or --force.
        word = "Written as asked, but slower than float"
    figures = ", ".join([*timed, f"{report.size_ratio:.2f} of the size", _accuracy_in_words(report)])
    late = "; time ran out, and this is the best plan until then" if report.search.limit else ""
    return f"{word}: {figures}{late}"


def _accuracy_in_words(report: Report) -> str:
    agreement, scores, place = report.agreement, report.accuracy.scores, f"on {report.evaluated_on}"
    worst = agreement.worst_sqnr
    if scores is not None:
        bound = ", with no bound for others" if scores.warning else ""
        return f"{scores.name} {scores.reference:.4g} -> {scores.candidate:.4g} {place}{bound}"
    is_label = any(output.sqnr is None and output.decibels == worst for output in agreement.outputs)
    what = describe_equality(agreement) if is_label or worst == math.inf else decibels(worst)
    return f"{what} {place}{_of_others(report)}{_of_few(report)}{compared(agreement)}"


def _of_others(report: Report) -> str:
    """Return the bound for other samples if it is below the wanted SQNR, or far below the measured one."""
    wanted, worst = report.accuracy.wanted, report.agreement.worst_sqnr
    lowest = min((output.bound for output in report.agreement.outputs if output.bound is not None), default=math.inf)
    missed = wanted is not None and lowest < wanted
    if math.isfinite(lowest) and (missed or lowest < worst - _FAR_BELOW < math.inf):
        return f" (at least {decibels(lowest)} on others)"
    return ""


def _of_few(report: Report) -> str:
    """Return that bounds of so few held-out samples are rough; "" if they are not, or there are none."""
    agreement, split = report.agreement, report.samples.split
    count = agreement.files or agreement.samples
    bounded = any(output.bound is not None and math.isfinite(output.bound) for output in agreement.outputs)
    if split is None or split.seen or not bounded or count > _FEW:
        return ""
    return f"; a bound from {plural(count, 'file' if agreement.files else 'sample')} is rough"


def _evaluation_samples(split: EvaluationSplit) -> str:
    by_these = counted(split.samples, split.files)
    if not split.seen:
        return by_these.replace("sample", "held-out sample", 1)
    if split.seen == split.samples:
        return f"{by_these} that the search used"
    return f"{by_these}, {split.seen} of which the search used"


# The closing summary: the terminal, the page and the JSON show the same rows in the same order.

_MOST_ROWS = 12
# Outputs with a row of their own, the worst first.
_SHOWN_OUTPUTS = 3
_LONGEST_NAME = 40


@dataclass(frozen=True)
class Row:
    """A row of the summary."""

    name: str
    text: str


def summary_rows(report: Report) -> tuple[Row, ...]:
    """Return what a user looks at first, at most twelve rows: accuracy, speed, size, then how it is quantized."""
    return (*_accuracy(report), *_how(report), *_notes(report))[:_MOST_ROWS]


def _accuracy(report: Report) -> Iterator[Row]:
    scores = report.accuracy.scores
    if scores is not None:
        loss = f"with 95 % confidence it loses at most {scores.most_lost:.2g} on unseen data"
        bound = "with no bound for unseen data" if scores.warning else loss
        yield Row("metric", f"{scores.name}: {scores.reference:.4g} -> {scores.candidate:.4g}; {bound}")
    outputs = sorted(report.agreement.outputs, key=lambda output: output.decibels)
    for output in outputs[:_SHOWN_OUTPUTS]:
        yield Row("accuracy", _output(output))
    if others := outputs[_SHOWN_OUTPUTS:]:
        least = others[0].decibels
        text = f"{decibels(least)} or more" if math.isfinite(least) else "equal"
        yield Row("accuracy", f"{plural(len(others), 'more output')}, {text}")
    for output in report.agreement.own_choices[:_SHOWN_OUTPUTS]:
        yield Row("own choices", f"{shortened(output.name, _LONGEST_NAME)} {own_choice(output)} with its own choices")
    for elsewhere in report.accuracy.on_engines:
        worst = min(elsewhere.agreement.outputs, key=lambda output: output.decibels)
        floats = "" if elsewhere.floats is None else f"; the float model has {decibels(elsewhere.floats)} there"
        yield Row("accuracy", f"on {elsewhere.engine} {_output(worst)}{floats}")
    if report.samples.images:
        yield Row("samples", report.samples.images)
    if (split := report.samples.split) is not None:
        generated = f"{report.evaluated_on}: none were given"
        tried = f"; candidates were compared on {split.tried}" if split.tried else ""
        rounds = f"; {split.rounds} models were judged" if split.rounds > 1 else ""
        text = generated if report.samples.generated else f"{_evaluation_samples(split)}{tried}{rounds}"
        yield Row("evaluated on", text)


def _how(report: Report) -> Iterator[Row]:
    files, kernels, plan = report.files, report.performance.kernels, report.plan
    if (latency := report.latency) is not None:
        times = f"{duration(latency.reference)} -> {duration(latency.candidate)}"
        yield Row("latency", f"{times} with {plural(latency.threads, 'thread')}, {latency.engine}")
    if report.performance.unmeasured:
        yield Row("latency", f"planned for {plan.target}, not measured: {report.performance.unmeasured}")
    beside = f"; keep {Path(files.data).name} beside the model, which has its weights" if files.data else ""
    yield Row("size", f"{size(files.float_bytes)} -> {size(files.bytes)}{beside}")
    if own := report.run.own_passes:
        yield Row("own passes", "; ".join(map(str, own)))
    between = f"; {plural(kernels.quantize, 'QuantizeLinear node')} between kernels" if kernels.quantize else ""
    heavy = kernels.heavy_integer + kernels.heavy_float
    yield Row("integer ops", f"{kernels.heavy_integer} of {heavy} convolutions and matrix multiplications{between}")
    if modes := ", ".join(f"{plan.count(mode)} {mode}" for mode in Mode if plan.count(mode)):
        yield Row("nodes", modes)
    weights = Counter(describe_spec(weight.spec) for decision in plan.decisions for weight in decision.weights)
    if report.search.sizes:
        yield Row("weights", _widths(plan))
    elif weights:
        yield Row("weights", _listed_counts(weights))
    activations = Counter(activation.spec.format for activation in plan.activations)
    if activations:
        yield Row("activations", f"{_listed_counts(activations)}; calibrated by {report.encoding.ranges}")
    if report.encoding.io:
        yield Row("inputs and outputs", "; ".join(map(str, report.encoding.io)))
    if methods := list(_methods(report)):
        yield Row("accuracy methods", ", ".join(methods))


def _methods(report: Report) -> Iterator[str]:
    for gain in report.encoding.gains:
        if gain.kept or gain.method == TRAINING:
            left = "" if gain.kept else f", not kept: {gain.left}"
            on = gain.device and f" on {gain.device}"
            yield f"{gain.method}{on} ({decibels(gain.before)} -> {decibels(gain.after)}{left})"
    if report.encoding.corrected_biases:
        yield f"bias correction ({plural(report.encoding.corrected_biases, 'node')})"
    if report.encoding.skipped_at_sqnr is not None:
        yield f"no others needed: the first plan has at least {decibels(report.encoding.skipped_at_sqnr)}"


def _notes(report: Report) -> Iterator[Row]:
    if limit := report.search.limit:
        yield Row("search", f"{'ended' if report.search.measured else 'left out'}, as the time of {limit} ran out")
    if cells := report.encoding.left_by_standard:
        yield Row("standard ONNX", f"has no integer operator for {cells} LSTM; --emit fastest measures onnxruntime's")
    if fixed := report.run.changed_by(FixInitializers):
        yield Row("inputs", f"{plural(fixed, 'initializer')} that the exporter lists as inputs are constants now")


def _output(output: OutputAgreement) -> str:
    parts = [] if output.sqnr is None else [f"SQNR {decibels(output.sqnr)}"]
    if output.bound is not None and math.isfinite(output.bound):
        parts.append(f"{decibels(output.bound)} or more on unseen data with 95 % confidence")
    if output.agreement is not None:
        parts.append(f"{output.agreement:.1%} {'equal' if output.sqnr is None else 'same top-1'}")
    stands_for = f", which decides {', '.join(output.stands_for)}" if output.stands_for else ""
    return f"{shortened(output.name, _LONGEST_NAME)}{stands_for}: {', '.join(parts) or 'not compared'}"


def describe_spec(spec: QuantSpec, *, granular: bool = True) -> str:
    """Return the format of a weight in words, with its blocks, and its granularity if that is not left out.

    >>> describe_spec(QuantSpec("int4", (2, 16))), describe_spec(QuantSpec("int8", Granularity.CHANNEL))
    ('int4 in blocks of 2x16', 'int8 per channel')
    """
    if isinstance(spec.granularity, Granularity):
        return f"{spec.format} per {spec.granularity}" if granular else spec.format
    return f"{spec.format} in blocks of {'x'.join(map(str, spec.granularity))}"


def _widths(plan: Plan) -> str:
    """Return how many weights have each number of bits."""
    bits = Counter(format_named(weight.spec.format).bits for decision in plan.decisions for weight in decision.weights)
    floats = sum(decision.mode is Mode.FLOAT and bool(decision.finer) for decision in plan.decisions)
    parts = [*(f"{count} of {width} bits" for width, count in sorted(bits.items())), f"{floats} in float"]
    return ", ".join(parts if floats else parts[:-1])


def _listed_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{what} ({count})" for what, count in counts.most_common(3))
