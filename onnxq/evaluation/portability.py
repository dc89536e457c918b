"""Whether engines compute the same model as onnxruntime, and the first node whose output differs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxq.calibration.instrument import append_outputs, tensor_types
from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Sample, generate_samples, is_floating, model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.errors import DataError, EngineError, OnnxqError
from onnxq.evaluation.agreement import Agreement, agreement_of, compare
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.latency import Latency, measure_latency
from onnxq.evaluation.reference import ReferenceModel
from onnxq.ir import load
from onnxq.ir.protos import is_large
from onnxq.onnx_api import weightless_model
from onnxq.passes.quantize.graph_io import with_float_io
from onnxq.runtime.engine import Engine, OnnxRuntime
from onnxq.runtime.sessions import Array, open_session, run, serialized
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.publish import staging


@dataclass(frozen=True, eq=False)
class FirstDifference:
    """Search for the first node whose inputs agree on two engines and whose output does not.

    Attributes:
        model: with its weights.
        sample: on which the engines differ.
        known: the reference engine.
        least: SQNR in decibels from which on tensors agree.
        folder: for models with added outputs.
    """

    model: onnx.ModelProto
    sample: Mapping[str, Array]
    known: Engine
    other: Engine
    least: float
    folder: Path
    seen: dict[str, bool] = field(default_factory=dict)

    def node(self, output: str) -> str:
        """Return the name and operator of the first node before an output that differs, or an empty string.

        Bisection needs few runs and finds a node that differs after one that does not. From there, it goes up to a node
        whose inputs agree.
        """
        makers = {name: node for node in self.model.graph.node for name in node.output if name}
        types = tensor_types(self.model)
        behind = _ancestors(makers, output)
        candidates = [
            name
            for node in self.model.graph.node
            for name in node.output[:1]
            if name in behind and name in types and _is_float(types[name])
        ]
        low, high = -1, len(candidates) - 1
        if high < 0 or self._agrees(candidates[high], types[candidates[high]]):
            return ""
        while high - low > 1:
            middle = (low + high) // 2
            if self._agrees(candidates[middle], types[candidates[middle]]):
                low = middle
            else:
                high = middle
        found = candidates[high]
        while above := next(
            (name for name in _floats_above(makers, found, set(candidates)) if not self._agrees(name, types[name])), ""
        ):
            found = above
        node = makers[found]
        return f"{node.name or found} ({node.op_type})"

    def _agrees(self, name: str, value: onnx.ValueInfoProto) -> bool:
        """Return whether a tensor agrees; also True if an engine cannot output it."""
        if name not in self.seen:
            path = self.folder / f"tapped-{len(self.seen)}.onnx"
            declared = any(one.name == name for one in self.model.graph.output)
            path.write_bytes(append_outputs(serialized(self.model), [] if declared else [value]))
            try:
                expected, found = (self._value(engine, path, name) for engine in (self.known, self.other))
                worst = agreement_of([name], [([expected], [found])])
                self.seen[name] = worst.sound and worst.worst_sqnr >= self.least
            except OnnxqError:
                self.seen[name] = True
        return self.seen[name]

    def _value(self, engine: Engine, path: Path, name: str) -> Array:
        with wrap_plugin_errors(f"engine {engine.name!r}", EngineError):
            loaded = engine.load(path)
            try:
                values: Array = np.asarray(loaded.run(self.sample)[loaded.outputs.index(name)])
                return values
            finally:
                loaded.close()


def _is_float(value: onnx.ValueInfoProto) -> bool:
    return is_floating(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)))


def _ancestors(makers: Mapping[str, onnx.NodeProto], output: str) -> set[str]:
    found, pending = set(), [output]
    while pending:
        name = pending.pop()
        if name in makers and name not in found:
            found.add(name)
            pending.extend(makers[name].input)
    return found


def _floats_above(makers: Mapping[str, onnx.NodeProto], name: str, floats: set[str]) -> set[str]:
    """Return the nearest float tensors that a tensor is computed from; quantized values are passed over."""
    found, pending, met = set(), list(makers[name].input), {name}
    while pending:
        one = pending.pop()
        if one in met:
            continue
        met.add(one)
        if one in floats:
            found.add(one)
        elif one in makers:
            pending.extend(makers[one].input)
    return found


# A model on every engine.

AGREEING = 20.0
"""SQNR in decibels beside onnxruntime from which on an engine computes the same model."""
# Decibels. An engine may round elsewhere, so quantized values differ; a larger loss is an error of the engine.
_ALLOWED = 3.0
_COMPARED_SAMPLES = 8
_TIMED_SAMPLES = 2
_MADE_UP = 16
_ROUNDS = 6
_PATIENCE = 20.0


@dataclass(frozen=True)
class EngineResult:
    """A model on one engine.

    Attributes:
        fault: why the model does not load or run there; else empty.
        agreement: with the model on onnxruntime; None if it does not run.
        accuracy: with the float model on onnxruntime; None if it does not run, or without a float model.
        latency: beside the float model on this engine; None if not measured.
        difference: the first node that differs; empty if the model agrees, or no node is found.
        agrees: whether the engine computes what onnxruntime does.
    """

    engine: str
    version: str
    fault: str = ""
    agreement: Agreement | None = None
    accuracy: Agreement | None = None
    latency: Latency | None = None
    difference: str = ""
    agrees: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; the decibels of the worst output are null if nothing differs."""
        worst = {
            name: None if one is None or math.isinf(one.worst_sqnr) else one.worst_sqnr
            for name, one in (("sqnr", self.agreement), ("float_sqnr", self.accuracy))
        }
        return {
            "engine": self.engine,
            "version": self.version,
            "loads": not self.fault,
            "fault": self.fault,
            "agrees": self.agrees,
            **worst,
            "speed": self.latency.speed if self.latency is not None else None,
            "latency": self._latency(),
            "difference": self.difference,
        }

    def _latency(self) -> dict[str, Any] | None:
        if self.latency is None:
            return None
        low, high = self.latency.interval
        return {**asdict(self.latency), "interval": [low, high if math.isfinite(high) else None]}


def portability(
    model: Path,
    engines: Iterable[Engine],
    data: Path | None = None,
    *,
    reference: Path | None = None,
    latency_seconds: float = 2.0,
    images: ImageOptions | None = None,
    limit: int | None = None,
) -> list[EngineResult]:
    """Run a model on engines and compare it with itself on onnxruntime in this process.

    Args:
        model: the file.
        engines: each is closed before the next one starts.
        data: file or folder of samples, at most 8 of which run; None generates some.
        reference: file of the float model, for its SQNR and speed.
        latency_seconds: time to spend on the speed of each engine; 0 leaves it out.
        images: how image files become arrays.
        limit: use only the first samples.

    Raises:
        ModelError: onnxruntime cannot load a model.
        DataError: The samples do not fit, or no generated sample runs.
    """
    found = []
    with with_float_io(model) as model:
        samples = _samples(model, data, images, limit)
        own = None
        if reference is not None:
            views = ComparisonSpec.of(reference, model)
            own = compare(ReferenceModel(reference, views), views.open(model), samples).worst_sqnr
        for engine in engines:
            with engine, staging(None) as folder:
                there = _Trip(model, reference, engine, samples, folder)
                found.append(there.port(own, latency_seconds))
    return found


@dataclass(frozen=True, eq=False)
class _Trip:
    model: Path
    reference: Path | None
    engine: Engine
    samples: Sequence[Sample]
    folder: Path

    def port(self, own: float | None, seconds: float) -> EngineResult:
        port = EngineResult(self.engine.name, self.engine.version)
        try:
            agreement = self._agreement(self.model)
            accuracy = None if self.reference is None else self._agreement(self.reference)
        except OnnxqError as error:
            return replace(port, fault=str(error))
        agrees = agreement.sound and agreement.worst_sqnr >= AGREEING
        if accuracy is not None and own is not None:
            agrees = accuracy.sound and accuracy.worst_sqnr >= min(own - _ALLOWED, AGREEING)
        port = replace(port, agreement=agreement, accuracy=accuracy, agrees=agrees)
        if not agrees:
            return replace(port, difference=self._difference(agreement))
        if self.reference is None or not seconds:
            return port
        try:
            timed = list(evenly(self.samples, _TIMED_SAMPLES))
            latency = measure_latency(
                self.reference,
                self.model,
                timed,
                seconds=seconds,
                rounds=_ROUNDS,
                patience=_PATIENCE,
                engine=self.engine,
            )
        except OnnxqError as error:
            return replace(port, fault=str(error))
        return replace(port, latency=latency)

    def _agreement(self, known: Path) -> Agreement:
        """Return how well the model on this engine agrees with a model on onnxruntime."""
        views = ComparisonSpec.of(known, self.model)
        view = views.open_on(self.engine, self.model, self.folder)
        try:
            return compare(ReferenceModel(known, views), view, self.samples)
        finally:
            view.loaded.close()

    def _difference(self, agreement: Agreement) -> str:
        """Return the first node that differs, if the model is below 1 GiB."""
        if is_large(self.model):
            return ""
        worst = min(agreement.outputs, key=lambda output: output.decibels if output.same_shapes else -math.inf)
        with OnnxRuntime() as known:
            search = FirstDifference(onnx.load(self.model), self.samples[0], known, self.engine, AGREEING, self.folder)
            return search.node(worst.name)


def _samples(model: Path, data: Path | None, images: ImageOptions | None, limit: int | None) -> list[Sample]:
    inputs = model_inputs(weightless_model(load(model)))
    if data is not None:
        return list(evenly(open_samples(data, inputs, images=images, limit=limit), _COMPARED_SAMPLES))
    session, running = open_session(model), []
    for sample in generate_samples(inputs, _MADE_UP):
        try:
            run(session, sample)
        except DataError as error:
            refused = error
            continue
        running.append(sample)
        if len(running) == _COMPARED_SAMPLES:
            break
    if not running:
        raise DataError(f"{model} does not run on generated samples ({refused}); give --data")
    return running
