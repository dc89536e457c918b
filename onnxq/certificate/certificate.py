"""The certificate as a value: what was measured of a quantized model, and probes; and its place in a model file."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from onnxq.certificate.onnxq_verify import KEY, VERSION, file_digest, read
from onnxq.errors import ModelError
from onnxq.ir.stored_tensors import external_locations
from onnxq.system.publish import replace_file
from onnxq.system.records import RecordError, read_record, to_plain

MOST_BYTES = 16 << 10
"""Bytes of a certificate at most."""


@dataclass(frozen=True)
class InputRecipe:
    """How the values of one input are made; `onnxq_verify.make_input` has the steps.

    Attributes:
        type: numpy's name of the element type, or ``string``.
        grain: by axis, how many neighbours the largest cells have; powers of two.
        tables: bytes of calibration data's quantiles in base64, which seeds take in turn; of strings, one table.
        rows: rows of a table, for as many neighbours along an axis.
        stride: elements between these neighbours.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    grain: tuple[int, ...]
    tables: tuple[str, ...]
    rows: int = 1
    stride: int = 1


@dataclass(frozen=True)
class Fingerprint:
    """What one output was for the probes when the certificate was made.

    Attributes:
        name: the output.
        scale: unit of the sketches.
        floats: sketches of the float model's output for all probes: int16 in base64.
        quantized: the same of the quantized model.
        finite: by probe, the number of finite elements.
        tolerances: by probe, the SQNR in decibels that a right output has beside the quantized model's at least.
        spare: number of probes that may miss this.
    """

    name: str
    scale: float
    floats: str
    quantized: str
    finite: tuple[int, ...]
    tolerances: tuple[float, ...]
    spare: int = 0


@dataclass(frozen=True)
class VerifiedOn:
    """A place where the probes ran when the certificate was made.

    Attributes:
        engine: runtime and version.
        instructions: type and widest vector instructions of the processor.
        threads: threads of an operator; 0 if the engine chose them.
        optimized: whether graph optimizations were on.
        sqnr: in decibels beside the float model, of the worst output over all probes.
    """

    engine: str
    instructions: str
    threads: int
    optimized: bool
    sqnr: float


@dataclass(frozen=True)
class Overflow:
    """Nodes whose integer sums may not fit their accumulator on some processors; ``a and 3 more`` shortens.

    Attributes:
        pairs: pairs of products may saturate 16 bits, on x86 processors without VNNI.
        sums: sums may exceed 32 bits.
    """

    pairs: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """The accuracy on real samples.

    Attributes:
        sqnr: in decibels, of the worst output.
        bound: lower 95 % confidence bound of it on other samples; None if it is not known.
        samples: number of samples.
        unseen: how many of these had neither set ranges nor chosen the plan.
        files: number of files that the samples come from, if those of one file count as one; else 0.
    """

    sqnr: float
    bound: float | None
    samples: int
    unseen: int
    files: int = 0


@dataclass(frozen=True)
class Certificate:
    """What is known of a quantized model, in its metadata_props.

    Attributes:
        made_by: versions of onnxq and onnxruntime.
        float_model: digest of what the float model computes, see `onnxq.calibration.provenance.model_digest`.
        graph: SHA-256 of the quantized model's file without metadata_props.
        data: SHA-256 of its files of external weights, by location.
        plan: digest of the plan; empty if another tool quantized the model.
        measured: the accuracy on samples.
        overflow: integer sums that may not fit.
        outputs: names of all outputs in order.
        seeds: of the probes.
        left_out: outputs that no probe compares, and why.
        quantized: scale and zero point of outputs that are quantized values; sketches are of their floats. A
            cache with a scale for each channel has 1, as its sketches are in units of these.
        without_probes: why there is no probe; else empty.
        version: of the JSON.
    """

    made_by: str
    float_model: str
    plan: str
    measured: Measured
    overflow: Overflow
    outputs: tuple[str, ...]
    inputs: tuple[InputRecipe, ...] = ()
    seeds: tuple[int, ...] = ()
    fingerprints: tuple[Fingerprint, ...] = ()
    verified: tuple[VerifiedOn, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    quantized: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    without_probes: str = ""
    graph: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> str:
        """Return the certificate as compact JSON."""
        return json.dumps(to_plain(self), separators=(",", ":"), ensure_ascii=False)

    @property
    def sqnr(self) -> float:
        """SQNR in decibels of the worst output over all probes where the model was certified."""
        return next((place.sqnr for place in self.verified), math.inf)


def write_certificate(certificate: Certificate, model: Path, output: Path | None = None) -> Certificate:
    """Write a certificate into a model file in place of an earlier one, and return it with the file's digests.

    Args:
        certificate: its digests of the file are set here.
        model: the file.
        output: file to write; None replaces the model. Its external data is copied beside it.

    Raises:
        OutputError: the file cannot be written; the old one stays.
    """
    output, content = output or model, model.read_bytes()
    proto = onnx.ModelProto.FromString(content)
    locations = external_locations(proto)
    if output.parent.resolve() != model.parent.resolve():
        for location in locations:
            (output.parent / location).parent.mkdir(parents=True, exist_ok=True)
            with replace_file(output.parent / location, "external data") as fresh:
                shutil.copyfile(model.parent / location, fresh)
    data = {location: file_digest(model.parent / location) for location in locations}
    certificate = replace(certificate, graph=read(content)[1], data=data)
    for entry in proto.metadata_props:
        if entry.key == KEY:
            content = content.replace(_metadata(entry), b"")
    with replace_file(output, "output") as fresh, fresh.open("wb") as stream:
        stream.write(content)
        stream.write(_metadata(onnx.StringStringEntryProto(key=KEY, value=certificate.to_json())))
        stream.flush()
        os.fsync(stream.fileno())
    return certificate


def read_certificate(model: Path) -> tuple[Certificate | None, str]:
    """Return the certificate of a model file, None without one, and the digest of the file without metadata_props.

    Raises:
        ModelError: the file cannot be read, or its certificate is damaged or of another version.
    """
    try:
        certificate, digest = read(model.read_bytes())
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error.strerror}; give the file of a model") from error
    except (LookupError, ValueError) as error:
        raise ModelError(
            f"{model} is not an ONNX model or its certificate is damaged ({error}); write it again"
        ) from error
    if certificate is None:
        return None, digest
    if not isinstance(certificate, dict) or certificate.get("version") != VERSION:
        raise ModelError(f"the certificate of {model} is not of version {VERSION}; verify with the onnxq that made it")
    try:
        return read_record(Certificate, "the certificate", certificate), digest
    except RecordError as error:
        raise ModelError(f"the certificate of {model} is damaged: {error}; certify the model again") from error


def _metadata(entry: onnx.StringStringEntryProto) -> bytes:
    """Return the field of an entry in a model's file."""
    return bytes(onnx.ModelProto(metadata_props=[entry]).SerializeToString())
