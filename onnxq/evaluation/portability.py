"""What a model does on every engine that is here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Sample, made_up_samples, model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.errors import DataError, OnnxqError
from onnxq.evaluation.agreement import Agreement, compare
from onnxq.evaluation.first_difference import FirstDifference
from onnxq.evaluation.latency import Latency, measure_latency
from onnxq.evaluation.reference import Reference
from onnxq.evaluation.views import Views
from onnxq.ir import load
from onnxq.ir.large_models import is_large
from onnxq.onnx_api import skeleton
from onnxq.runtime.engine import Engine
from onnxq.runtime.local import OnnxRuntime
from onnxq.runtime.sessions import open_session, run
from onnxq.system.publish import staging

AGREEING = 20.0
"""Decibels beside onnxruntime from which on an engine computes the same model."""
# An engine rounds in places of its own, so codes may differ; beyond this it adds noise of its own.
_ALLOWED = 3.0
_COMPARED_SAMPLES = 8
_TIMED_SAMPLES = 2
_MADE_UP = 16
_ROUNDS = 6
_PATIENCE = 20.0


@dataclass(frozen=True)
class Port:
    """A model on one engine.

    Attributes:
        engine: its name.
        version: what it is.
        fault: why the model does not load or run there; empty where it does.
        agreement: with the model on onnxruntime; None where it does not run.
        fidelity: with the float model on onnxruntime; None likewise, or without a float model.
        latency: beside the float model on this engine; None likewise.
        difference: the first node that differs, where the model does not agree; empty where it is not found.
        agrees: whether it computes there what it computes on onnxruntime.
    """

    engine: str
    version: str
    fault: str = ""
    agreement: Agreement | None = None
    fidelity: Agreement | None = None
    latency: Latency | None = None
    difference: str = ""
    agrees: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; decibels, the worst output's, are null where nothing differs."""
        worst = {
            name: None if one is None or math.isinf(one.worst_sqnr) else one.worst_sqnr
            for name, one in (("sqnr", self.agreement), ("float_sqnr", self.fidelity))
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
    seconds: float = 2.0,
    images: ImageOptions | None = None,
    limit: int | None = None,
) -> list[Port]:
    """Run a model on engines and compare it with itself on onnxruntime in this process.

    Args:
        model: the file.
        engines: each is closed when the next one is asked for.
        data: at most 8 of these samples are run; None makes some up.
        reference: file of the float model, for fidelity and speed.
        seconds: time to spend on speed for each engine; 0 leaves it out.
        images: how image files become arrays.
        limit: use only the first samples.

    Returns:
        What each does.

    Raises:
        ModelError: onnxruntime cannot load a model.
        DataError: the samples do not fit, or none that was made up runs.
    """
    samples = _samples(model, data, images, limit)
    own = None
    if reference is not None:
        views = Views.of(reference, model)
        own = compare(Reference(reference, views), views.open(model), samples).worst_sqnr
    found = []
    for engine in engines:
        with engine, staging(None) as folder:
            there = _Trip(model, reference, engine, samples, folder)
            found.append(there.port(own, seconds))
    return found


@dataclass(frozen=True, eq=False)
class _Trip:
    """A model taken to an engine."""

    model: Path
    reference: Path | None
    engine: Engine
    samples: Sequence[Sample]
    folder: Path

    def port(self, own: float | None, seconds: float) -> Port:
        port = Port(self.engine.name, self.engine.version)
        try:
            agreement = self._agreement(self.model)
            fidelity = None if self.reference is None else self._agreement(self.reference)
        except OnnxqError as error:
            return replace(port, fault=str(error))
        agrees = agreement.sound and agreement.worst_sqnr >= AGREEING
        if fidelity is not None and own is not None:
            agrees = fidelity.sound and fidelity.worst_sqnr >= min(own - _ALLOWED, AGREEING)
        port = replace(port, agreement=agreement, fidelity=fidelity, agrees=agrees)
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
        """Return how well the model agrees there with a model on onnxruntime here."""
        views = Views.of(known, self.model)
        view = views.open_on(self.engine, self.model, self.folder)
        try:
            return compare(Reference(known, views), view, self.samples)
        finally:
            view.loaded.close()

    def _difference(self, agreement: Agreement) -> str:
        """Return the first node that differs, where the model is small enough to be looked into."""
        if is_large(self.model):
            return ""
        worst = min(agreement.outputs, key=lambda output: output.decibels if output.same_shapes else -math.inf)
        with OnnxRuntime() as known:
            search = FirstDifference(onnx.load(self.model), self.samples[0], known, self.engine, AGREEING, self.folder)
            return search.node(worst.name)


def _samples(model: Path, data: Path | None, images: ImageOptions | None, limit: int | None) -> list[Sample]:
    inputs = model_inputs(skeleton(load(model)))
    if data is not None:
        return list(evenly(open_samples(data, inputs, images=images, limit=limit), _COMPARED_SAMPLES))
    session, running = open_session(model), []
    for sample in made_up_samples(inputs, _MADE_UP):
        try:
            run(session, sample)
        except DataError as error:
            refused = error
            continue
        running.append(sample)
        if len(running) == _COMPARED_SAMPLES:
            break
    if not running:
        raise DataError(f"{model} runs on no sample that was made up ({refused}); give --data")
    return running
