"""The certificate as a value: what was measured of a quantized model, and probes; and its place in a model file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from onnxq.certificate.onnxq_verify import KEY, VERSION, fields, read
from onnxq.errors import ModelError
from onnxq.ir.protos import external_locations
from onnxq.system.publish import replace_file
from onnxq.system.records import RecordError, read_record, to_plain

MOST_BYTES = 16 << 10
"""Bytes of a certificate at most."""

_METADATA_FIELD = b"\x72"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class InputRecipe:
    """How the values of one input are made; `onnxq_verify.make_input` has the steps.

    Attributes:
        type: numpy's name of the element type, or ``string``.
        grain: by axis, the number of neighbours that share one random number.
        axis: the axis that chooses a table; 0 if there is one table.
        tables: quantiles of the calibration data, as whole numbers.
        exponents: of 2, by which the whole numbers of each table are multiplied for float inputs.
        texts: the strings that the tables index.
    """

    name: str
    type: str
    grain: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    axis: int = 0
    exponents: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fingerprint:
    """What one output of a probe was when the certificate was made.

    Attributes:
        name: the output.
        floats: sketch of the float model's output: int16 in base64, in units of `scale`; empty for labels.
        quantized: sketch of the quantized model's output, or its labels.
        tolerance: SQNR in decibels that an output has beside the certified one at least, or the share of equal labels.
        top: index of the largest element; -1 if rounding may change it.
        lost: number of elements that are not finite.
        labels: whether the output holds integers, bools or strings.
    """

    name: str
    shape: tuple[int, ...]
    floats: str
    quantized: str
    scale: float
    tolerance: float
    top: int = -1
    lost: int = 0
    labels: bool = False


@dataclass(frozen=True)
class Probe:
    """A seed and the shapes of the inputs, with the outputs that they give; `scale` multiplies grains above 1."""

    seed: int
    scale: int
    shapes: tuple[tuple[int, ...], ...]
    outputs: tuple[Fingerprint, ...]


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
        left_out: outputs that no probe compares, and why.
        without_probes: why there is no probe; else empty.
        version: of the JSON.
    """

    made_by: str
    float_model: str
    plan: str
    measured: Measured
    overflow: Overflow
    inputs: tuple[InputRecipe, ...]
    outputs: tuple[str, ...]
    probes: tuple[Probe, ...]
    verified: tuple[VerifiedOn, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
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
        return next((one.sqnr for one in self.verified), math.inf)


def write_certificate(certificate: Certificate, model: Path, output: Path | None = None) -> Certificate:
    """Write a certificate into a model file in place of an earlier one, and return it with the file's digests.

    Args:
        certificate: its digests of the file are set here.
        model: the file.
        output: file to write; None replaces the model. Its external data is copied beside it.

    Raises:
        OutputError: the file cannot be written; the old one stays.
    """
    output = output or model
    locations = external_locations(onnx.load(model, load_external_data=False))
    if output.parent.resolve() != model.parent.resolve():
        for location in locations:
            (output.parent / location).parent.mkdir(parents=True, exist_ok=True)
            with replace_file(output.parent / location, "external data") as fresh:
                shutil.copyfile(model.parent / location, fresh)
    data = {location: _file_digest(model.parent / location) for location in sorted(locations)}
    certificate = replace(certificate, graph=read(model)[1], data=data)
    kept = [
        field for number, field, value in fields(memoryview(model.read_bytes())) if not _is_certificate(number, value)
    ]
    entry = onnx.StringStringEntryProto(key=KEY, value=certificate.to_json()).SerializeToString()
    with replace_file(output, "output") as fresh, fresh.open("wb") as stream:
        stream.writelines((*kept, _METADATA_FIELD, _varint(len(entry)), entry))
        stream.flush()
        os.fsync(stream.fileno())
    return certificate


def read_certificate(model: Path) -> tuple[Certificate | None, str]:
    """Return the certificate of a model file, None without one, and the digest of the file without metadata_props.

    Raises:
        ModelError: the file cannot be read, or its certificate is damaged or of another version.
    """
    try:
        found, digest = read(model)
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error.strerror}; give the file of a model") from error
    except (LookupError, ValueError) as error:
        raise ModelError(f"{model} is no ONNX model or its certificate is damaged ({error}); write it again") from error
    if found is None:
        return None, digest
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ModelError(f"the certificate of {model} is not of version {VERSION}; verify with the onnxq that made it")
    try:
        return read_record(Certificate, "the certificate", found), digest
    except RecordError as error:
        raise ModelError(f"the certificate of {model} is damaged: {error}; certify the model again") from error


def _is_certificate(number: int, value: memoryview) -> bool:
    return number == _METADATA_FIELD[0] >> 3 and onnx.StringStringEntryProto.FromString(bytes(value)).key == KEY


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
