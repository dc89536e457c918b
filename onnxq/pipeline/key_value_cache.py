"""Give the decoder of a folder a key-value cache of int8, with a scale for each channel from samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxq.calibration.segments import read_without_data
from onnxq.certificate.certificate import Certificate, Measured, read_certificate, write_certificate
from onnxq.certificate.making import make_certificate, measured_of, open_floating, running
from onnxq.certificate.onnxq_verify import KEY, file_digest
from onnxq.data.inputs import Sample
from onnxq.data.samples import evenly
from onnxq.errors import SchemeError, collect_failures, tolerate
from onnxq.evaluation.agreement import Agreement, agreement_of
from onnxq.evaluation.goal import EvaluationSplit, Goal, fault
from onnxq.ir import load
from onnxq.ir.protos import node_protos
from onnxq.numerics.affine import decibels
from onnxq.passes.quantize.graph_io import GraphTensor
from onnxq.pipeline.quantization import Quantized
from onnxq.pipeline.sessions import Session, Steps, run_sessions
from onnxq.report import AccuracyError
from onnxq.runtime.sessions import Array, attends_to_integers, open_session, runtime_version, serialized
from onnxq.system.publish import data_file, stored_bytes

OPERATOR = "GroupQueryAttention"
_PASTS, _PRESENTS, _SCALES = slice(3, 5), slice(1, 3), slice(12, 14)
_SETTINGS = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
_LARGEST = 127
# A channel that samples leave empty has this share of the largest scale of its head.
_SMALLEST = 0.01
_COMPARED = 16

Scales = Mapping[str, Array]
"""Scales of heads and channels, (1, heads, 1, size), by the names of the presents."""


@dataclass(frozen=True, eq=False)
class KeyValueCache:
    """The keys and values that a decoder with float inputs and outputs remembers.

    Attributes:
        session: the float decoder.
        pasts: names of the inputs by those of the outputs that hold one more token.
        scales: what an integer stands for.
    """

    session: Session
    pasts: Mapping[str, str]
    scales: Scales

    def write(self, model: Path) -> None:
        """Give a quantized model of the decoder inputs and outputs of int8. Its weights and external data stay."""
        proto = read_without_data(model)
        graph = proto.graph
        for node in _attentions(proto):
            node.input.extend([""] * (_SCALES.stop - len(node.input)))
            node.input[_SCALES] = [f"{past}.scale" for past in node.input[_PASTS]]
            node.attribute.extend(helper.make_attribute(name, value) for name, value in _SETTINGS.items())
        for present, past in self.pasts.items():
            graph.initializer.append(numpy_helper.from_array(self.scales[present], f"{past}.scale"))
        changed = {*self.pasts, *self.pasts.values()}
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.name in changed:
                value.type.tensor_type.elem_type = onnx.TensorProto.INT8
        kept = [entry for entry in proto.metadata_props if entry.key != KEY]
        del proto.metadata_props[:]
        proto.metadata_props.extend(kept)
        model.write_bytes(serialized(proto))

    def steps(self, samples: Sequence[Sample], model: Path | None = None) -> Iterator[Steps]:
        """Run the float decoder, or a model that `write` wrote, on samples without a past and behind one."""
        session, pasts = self.session, {*self.pasts.values()}
        if model is not None:
            types = (np.dtype(np.int8) if one.name in pasts else one.dtype for one in session.inputs)
            inputs = (replace(one, dtype=dtype) for one, dtype in zip(session.inputs, types, strict=True))
            session = replace(session, inputs=tuple(inputs))
        return run_sessions([session], [model or session.file], {session.file: samples})

    def agreement(self, model: Path, samples: Sequence[Sample]) -> Agreement:
        """Compare all outputs but the cache with those of the float decoder, without a past and behind one."""
        kept = [place for place, name in enumerate(self.session.outputs) if name not in self.pasts]
        names = [f"{self.session.outputs[place]}{behind}" for behind in ("", " behind a past") for place in kept]

        def flat(steps: Steps) -> list[Any]:
            return [step.made[place] for step in steps[self.session.file] for place in kept]

        runs = zip(self.steps(samples), self.steps(samples, model), strict=True)
        return agreement_of(names, ((flat(one), flat(other)) for one, other in runs))

    def certify(
        self, model: Path, samples: Sequence[Sample], agreement: Agreement, measured: Measured, plan: str
    ) -> Certificate:
        """Write a certificate into a model, and return it."""
        floating, scales = open_floating(self.session.file), self.scales
        by_past = {past: scales[present] for present, past in self.pasts.items()}

        def run(sample: Sample) -> Mapping[str, Any]:
            made = floating({name: one * by_past[name] if name in by_past else one for name, one in sample.items()})
            return {name: one / scales[name] if name in scales else one for name, one in made.items()}

        # The cache is compared in units of its scales.
        tensors = [GraphTensor(name, "output", "int8") for name in scales]
        given = [steps[self.session.file][0].given for steps in self.steps(samples, model)]
        runs = run, running(open_session(model, threads=1))
        file = self.session.file
        made = make_certificate(file, model, given, agreement, measured, runs=runs, plan=plan, tensors=tensors)
        return write_certificate(made, model)


def find_cache(session: Session) -> Mapping[str, str]:
    """Return the names of the float pasts that GroupQueryAttention reads, by those of the presents that it writes.

    Raises:
        SchemeError: the decoder has none, another node reads them, or onnxruntime is too old.
    """
    if not attends_to_integers():
        raise SchemeError(f"a cache of int8 needs onnxruntime 1.32 or later, found {runtime_version()}; update it")
    proto = read_without_data(session.file)
    named = (*proto.graph.input, *proto.graph.output)
    floats = {one.name for one in named if one.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    readers = Counter(name for node in node_protos(proto.graph.node) for name in node.input)
    found: dict[str, str] = {}
    for node in _attentions(proto):
        pairs = dict(zip((*node.output, "", "")[_PRESENTS], (*node.input, "")[_PASTS], strict=True))
        for present, past in pairs.items():
            if not {present, past} <= floats or past not in session.past or readers[past] > 1 or readers[present]:
                raise SchemeError(
                    f"{OPERATOR} {node.name} of {session.file} reads {past!r} and writes {present!r}, expected floats "
                    "that are inputs and outputs of the decoder and that no other node reads; leave --cache int8 out"
                )
        found |= pairs
    # The package makes all keys and values of one type.
    left = sorted(session.read_by(session.reads.values()) - {*found.values()})
    if left or not found:
        raise SchemeError(
            f"{session.file} has no {OPERATOR} for {left[0] if left else 'a past'}, expected one in each layer, as "
            "onnxruntime-genai's builder writes it; leave --cache int8 out"
        )
    return found


def measure_cache(session: Session, pasts: Mapping[str, str], samples: Sequence[Sample]) -> KeyValueCache:
    """Return the cache of a decoder, with scales by which the largest keys and values of samples still fit.

    Args:
        session: the float decoder.
        pasts: see `find_cache`.
        samples: without a past.
    """
    cache = KeyValueCache(session, pasts, {})
    places = {name: session.outputs.index(name) for name in cache.pasts}
    largest: dict[str, Array] = {}
    for steps in cache.steps(samples):
        # The last step gives the keys and values of all tokens.
        for name, place in places.items():
            here = np.abs(steps[session.file][-1].made[place]).max(axis=(0, 2), keepdims=True)
            largest[name] = np.maximum(here, largest.get(name, here))
    return replace(cache, scales={name: _scales(one) for name, one in largest.items()})


def quantize_cache(
    cache: KeyValueCache, model: Path, done: Quantized, samples: Sequence[Sample], goal: Goal, *, unseen: bool
) -> Quantized:
    """Give a quantized decoder a cache of int8, and compare it with the float decoder once more.

    Args:
        cache: of the float decoder.
        model: file of the quantized decoder, which is replaced.
        done: how it came about.
        samples: some of these are compared.
        goal: of all outputs but the cache.
        unseen: whether the samples gave no ranges.

    Raises:
        AccuracyError: the goal is missed.
    """
    looked = list(evenly(samples, _COMPARED))
    old, _ = read_certificate(model)
    cache.write(model)
    found = cache.agreement(model, looked)
    split = EvaluationSplit(len(looked), 0 if unseen else len(looked), apart=unseen)
    accuracy = replace(done.report.accuracy, agreement=found, layers=None)
    report = replace(done.report, accuracy=accuracy, samples=replace(done.report.samples, split=split))
    wrong = fault(found)
    if not wrong and found.worst_sqnr < goal.min_sqnr and not goal.force:
        wrong = f"with a cache of int8 the decoder has {decibels(found.worst_sqnr)}, expected {goal.min_sqnr:g}"
    if wrong:
        raise AccuracyError(f"{wrong}; nothing was written; leave --cache int8 out", report)
    measured = measured_of(found, split.samples - split.seen)
    certificate: Certificate | None = None
    if old is not None:
        with collect_failures() as failures, tolerate("the certificate"):
            certificate = cache.certify(model, looked, found, measured, old.plan)
        report = replace(report, run=replace(report.run, failures=(*report.run.failures, *map(str, failures))))
    files = replace(report.files, bytes=stored_bytes(model, (data_file(model),)), output_digest=file_digest(model))
    return Quantized(load(model), replace(report, files=files, certificate=certificate))


def _attentions(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.op_type == OPERATOR and any(node.input[_PASTS])]


def _scales(largest: Array) -> Array:
    """Return scales by which the largest magnitudes of heads and channels become 127."""
    least = _SMALLEST * largest.max(axis=-1, keepdims=True)
    # A head of zeros needs any scale.
    floor = np.where(least > 0, least, 1.0)
    return np.asarray(np.maximum(largest, floor) / _LARGEST, np.float32)
