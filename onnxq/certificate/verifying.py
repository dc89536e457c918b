"""Verify a model where it runs: its digest fits, it loads, and its probes agree with the certificate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from onnxq.calibration.provenance import instruction_set, model_digest
from onnxq.certificate.certificate import Certificate, read_certificate
from onnxq.certificate.onnxq_verify import changed_data, judge, make_probe
from onnxq.data.inputs import Sample
from onnxq.errors import DataError, EngineError, ModelError, OnnxqError, check_path
from onnxq.evaluation.first_difference import first_difference
from onnxq.evaluation.layers import compare_layers
from onnxq.ir.stored_tensors import is_large
from onnxq.numerics.affine import decibels
from onnxq.passes.quantize.graph_io import float_values, tensors_of
from onnxq.runtime.engine import Engine, OnnxRuntime
from onnxq.runtime.engines import DEFAULT_ENGINE, open_engine
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.publish import staging
from onnxq.system.records import to_plain

# Decibels of a layer that reads the float model's tensors, below which it computes something else.
_ANOTHER_LAYER = 10.0
# Decibels that only an output of zeros has.
_NO_SIGNAL = -1000.0


@dataclass(frozen=True)
class EngineVerdict:
    """A certified model on one engine.

    Attributes:
        engine: runtime and version.
        instructions: type and widest vector instructions of the processor; empty on another machine.
        right: whether all probes agree.
        sqnr: in decibels beside the float model, of the worst output over all probes; infinite if nothing differs.
        certified: the same where the model was certified.
        wrong: outputs that differ, each with the number of probes and its SQNR.
        fault: why the model does not load or run there; else empty.
        first: the first node that differs, if it was looked for and found.
    """

    engine: str
    instructions: str
    right: bool
    sqnr: float = math.inf
    certified: float = math.inf
    wrong: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    fault: str = ""
    first: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether a model is what its certificate says, where it was verified.

    Attributes:
        model: the file.
        certificate: None if there is none.
        fault: why the file is not the certified one; else empty.
        engines: the probes on each engine.
    """

    model: str
    certificate: Certificate | None
    fault: str
    engines: tuple[EngineVerdict, ...] = ()

    @property
    def right(self) -> bool:
        """Whether the file is the certified one, and every engine is right."""
        return not self.fault and all(engine.right for engine in self.engines)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The verdict in words, one sentence for the file if it is wrong, and one for each engine."""
        probes = len(self.certificate.seeds) if self.certificate is not None else 0
        kind = "Wrong here" if self.certificate is not None else "Not checked"
        sentences = [f"{kind}: {self.fault}"] if self.fault else []
        return (*sentences, *(self._sentence(engine, probes) for engine in self.engines))

    def _sentence(self, verdict: EngineVerdict, probes: int) -> str:
        place = f"on {verdict.engine}" + (f" with {verdict.instructions}" if verdict.instructions else "")
        if verdict.fault:
            return f"Wrong here: {verdict.fault}, {place}"
        if verdict.wrong:
            text = (
                f"output {name} has {decibels_text(sqnr)} on {count} of {probes} probes"
                for name, (count, sqnr) in verdict.wrong.items()
            )
            first = f"; first at node {verdict.first}" if verdict.first else ""
            expected = f"the certificate has {decibels_text(verdict.certified)}"
            return f"Wrong here: {', '.join(text)}; {expected}{first}, {place}"
        if not probes and self.certificate is not None:
            return f"Loads here, with nothing to compare: {self.certificate.without_probes}, {place}"
        beside = f"{decibels_text(verdict.sqnr)} beside the certificate's {decibels_text(verdict.certified)}"
        return f"{'Right here' if not self.fault else 'Its outputs are still right'}: {beside}, {place}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the probes; infinite decibels are the word Infinity."""
        kept = None
        if self.certificate is not None:
            kept = {**to_plain(self.certificate), "probes": len(self.certificate.seeds)}
            for name in ("inputs", "seeds", "fingerprints"):
                del kept[name]
        engines = to_plain(self.engines)
        return {"model": self.model, "right": self.right, "fault": self.fault, "engines": engines, "certificate": kept}


def decibels_text(value: float) -> str:
    """Return decibels with a digit, or that nothing differs.

    >>> decibels_text(31.42), decibels_text(math.inf)
    ('31.4 dB', 'no error')
    """
    return "no error" if value == math.inf else "no signal" if value < _NO_SIGNAL else decibels(value)


def verify(
    model: str | Path, *, engines: Sequence[str | Engine] = (DEFAULT_ENGINE,), reference: str | Path | None = None
) -> Verdict:
    """Check a model against its certificate on engines.

    Args:
        model: the file.
        engines: names as in `onnxq.runtime.engines.open_engine`, or engines, which stay open.
        reference: file of the float model, which shows the first node that differs.

    Raises:
        ModelError: a file cannot be read, its certificate is damaged, or the float model is not the certified one.
        EngineError: an engine is unknown, is not installed, or does not start.

    >>> verify("models/gru.onnx").fault
    'the model has no certificate; make one with onnxq certify FLOAT MODEL --data SAMPLES'
    """
    check_path(model, "the model")
    model = Path(model)
    certificate, digest = read_certificate(model)
    if certificate is None:
        fault = "the model has no certificate; make one with onnxq certify FLOAT MODEL --data SAMPLES"
        return Verdict(str(model), None, fault)
    if reference is not None and model_digest(Path(reference)) != certificate.float_model:
        raise ModelError(f"{reference} is not the float model of the certificate; give the one that was quantized")
    verdicts = []
    for name in engines:
        with open_engine(name) if isinstance(name, str) else nullcontext(name) as engine:
            verdict = _verdict_on(engine, model, certificate)
            if verdict.wrong:
                verdict = replace(verdict, first=_first_difference(engine, model, certificate, verdict, reference))
            verdicts.append(verdict)
    return Verdict(str(model), certificate, _file_fault(model, certificate, digest), tuple(verdicts))


def _verdict_on(engine: Engine, model: Path, certificate: Certificate) -> EngineVerdict:
    """Run the probes of a certificate on an engine."""
    place = EngineVerdict(engine.version, "" if engine.name.startswith("ssh") else instruction_set(), right=False)
    plain = to_plain(certificate)
    try:
        with wrap_plugin_errors(f"engine {engine.name!r}", EngineError), closing(engine.load(model)) as loaded:
            if missing := [name for name in certificate.outputs if name not in loaded.outputs]:
                return replace(place, fault=f"the certificate's output {missing[0]} does not exist")
            verdict = judge(plain, lambda sample: dict(zip(loaded.outputs, loaded.run(sample), strict=True)))
    except OnnxqError as error:
        return replace(place, fault=str(error))
    wrong = {name: (count, verdict["outputs"].get(name, (0.0,))[0]) for name, count in verdict["wrong"].items()}
    return replace(place, right=verdict["right"], sqnr=verdict["sqnr"], certified=verdict["certified"], wrong=wrong)


def _file_fault(model: Path, certificate: Certificate, digest: str) -> str:
    if digest != certificate.graph:
        return "the file was changed after it was certified"
    if changed := changed_data(to_plain(certificate), model.parent):
        return f"its weights in {changed[0]} are missing or were changed after it was certified"
    return ""


def _first_difference(
    engine: Engine, model: Path, certificate: Certificate, verdict: EngineVerdict, reference: str | Path | None
) -> str:
    """Return the first node that differs from onnxruntime in this process, or else from the float model."""
    if is_large(model):
        return ""
    samples: list[Sample] = [make_probe(to_plain(certificate), seed) for seed in certificate.seeds]
    if not isinstance(engine, OnnxRuntime):
        with staging(None) as folder, OnnxRuntime() as runtime:
            return first_difference(onnx.load(model), next(iter(verdict.wrong)), samples[0], runtime, engine, folder)
    floats = [float_values(sample, tensors_of(model)) for sample in samples]
    return _first_layer(Path(reference), model, floats) if reference is not None else ""


def _first_layer(reference: Path, model: Path, samples: Sequence[Sample]) -> str:
    """Return the first layer that computes something else than the float model's, or else the one of most error."""
    try:
        layers = compare_layers(reference, model, samples).layers
    except DataError:
        return ""
    if not layers:
        return ""
    worst = min(layers, key=lambda layer: layer.isolated)
    first = next((layer for layer in layers if layer.isolated < _ANOTHER_LAYER), worst)
    return f"{first.node or first.tensor} ({first.op_type})"
