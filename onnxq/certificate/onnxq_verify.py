"""Check a model against the certificate that onnxq wrote into it, with numpy and onnxruntime alone.

Copy this file into an application, and call `verify` at install or at the first load::

    python onnxq_verify.py model.onnx

A certificate is no signature: it finds damage and runtimes that compute something else, not forgery.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

KEY = "onnxq.certificate"
"""Key of the certificate in a model's metadata_props."""
VERSION = 1
"""Of the certificate's JSON."""

_METADATA = 14
_BUCKETS = 64
# Larger magnitudes stand for infinity, as masks do; their squares would hide everything else.
_HUGE = 1e30
_FLOATS = ("float32", "float64")


def read(model: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the certificate of a model file, and the SHA-256 of all its fields but the metadata_props."""
    data, digest, found = memoryview(model.read_bytes()), hashlib.sha256(), None
    for number, field, value in fields(data):
        if number != _METADATA:
            digest.update(field)
            continue
        entry = {inner: bytes(text) for inner, _, text in fields(value)}
        if entry.get(1) == KEY.encode():
            found = json.loads(entry[2])
    return found, digest.hexdigest()


def fields(message: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yield the number, all bytes and the content of each field of a protocol buffer."""
    place = 0
    while place < len(message):
        start = place
        tag, place = _varint(message, place)
        content = place
        if tag & 7 == 2:
            length, content = _varint(message, place)
            place = content + length
        elif tag & 7 == 0:
            _, place = _varint(message, place)
        else:
            place += {1: 8, 5: 4}[tag & 7]
        yield tag >> 3, message[start:place], message[content:place]


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value, place, shift = value | (byte & 127) << shift, place + 1, shift + 7
        if byte < 128:
            return value, place


def mix(values: Any) -> Any:
    """Return 32 pseudo-random bits for each uint32: the hash lowbias32 of Chris Wellons' hash-prospector."""
    values = (values ^ values >> np.uint32(16)) * np.uint32(0x7FEB352D)
    values = (values ^ values >> np.uint32(15)) * np.uint32(0x846CA68B)
    return values ^ values >> np.uint32(16)


def _key(seed: int, stream: int) -> Any:
    return mix(np.array([(seed * 0x9E3779B9 + stream) & 0xFFFFFFFF], np.uint32))


def make_input(recipe: Mapping[str, Any], shape: list[int], seed: int, stream: int, scale: int = 1) -> Any:
    """Return the values of an input, the same bits wherever they are made.

    Neighbours within a grain share one random number, but each 16th element has its own. It takes the entry of a table
    of quantiles; of floats, it interpolates between two of them in integers. `scale` multiplies grains above 1.
    """
    grains = [one * scale if one > 1 else 1 for one in recipe["grain"]]
    cells: Any
    column: Any
    size, cells, column = math.prod(shape), np.uint32(0), np.uint32(0)
    for axis, (dim, grain) in enumerate(zip(shape, grains, strict=True)):
        index = np.arange(dim, dtype=np.uint32).reshape([-1 if one == axis else 1 for one in range(len(shape))])
        cells = cells * np.uint32(-(-dim // grain)) + index // np.uint32(grain)
        column = column + (index if axis == recipe["axis"] else np.uint32(0))
    cells, column = (np.broadcast_to(one, shape).reshape(-1) for one in (cells, column))
    own = mix(np.arange(size, dtype=np.uint32) ^ _key(seed, 2 * stream))
    drawn = np.where(own & np.uint32(15) == 0, own, mix(cells ^ _key(seed, 2 * stream + 1))).astype(np.int64)
    table = np.array(recipe["tables"], np.int64)
    row = column.astype(np.int64) % len(table)
    if recipe["type"] not in _FLOATS:
        chosen = table[row, (drawn >> 16) * table.shape[1] >> 16]
        if recipe["type"] == "string":
            return np.array([recipe["texts"][one] for one in chosen], object).reshape(shape)
        # 16-bit floats are tables of their bits.
        bits = np.dtype({"float16": "uint16"}.get(recipe["type"], recipe["type"]))
        return chosen.astype(bits).view(recipe["type"]).reshape(shape)
    place, part = (drawn >> 16) * (table.shape[1] - 1) >> 16, drawn >> 8 & 255
    sums = table[row, place] * (256 - part) + table[row, place + 1] * part
    return (sums * 2.0 ** np.array(recipe["exponents"])[row]).astype(recipe["type"]).reshape(shape)


def make_probe(certificate: Mapping[str, Any], probe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a probe by name."""
    given = enumerate(zip(certificate["inputs"], probe["shapes"], strict=True))
    seed, scale = probe["seed"], probe["scale"]
    return {one["name"]: make_input(one, shape, seed, place, scale) for place, (one, shape) in given}


def sketch(values: Any, buckets: int, seed: int) -> tuple[Any, int]:
    """Return sums of randomly signed elements in buckets, and the number of elements that are not finite.

    The sum of their squares estimates the squared norm (Charikar, Chen, Farach-Colton 2002, count sketch).
    """
    flat = np.asarray(values).astype(np.float64).reshape(-1)
    places = np.arange(flat.size, dtype=np.uint32)
    hashed, lost = mix(places ^ _key(seed, 0xFFFF)), ~(np.abs(flat) < _HUGE)
    bucket = np.where(places < buckets, places, hashed >> np.uint32(8) & np.uint32(buckets - 1))
    signed = np.where(hashed & np.uint32(1), -1.0, 1.0) * np.where(lost, 0.0, flat)
    return np.bincount(bucket, signed, buckets), int(lost.sum())


def labels(values: Any) -> Any:
    """Return 16 bits of at most 64 evenly spaced elements of an output of integers, bools or strings."""
    flat = np.asarray(values).reshape(-1)
    count = min(flat.size, _BUCKETS)
    chosen = [flat[place * flat.size // max(count, 1)] for place in range(count)]
    whole = [sum(one.encode()) if isinstance(one, str) else int(one) for one in chosen]
    return np.array([(one & 0xFFFF ^ 0x8000) - 0x8000 for one in whole], np.float64)


def decibels(wanted: Any, found: Any) -> float:
    """Return the signal-to-noise ratio of sketches, infinite if they are equal."""
    signal, noise = float(np.square(wanted).sum()), float(np.square(found - wanted).sum())
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def unpack(text: str, scale: float) -> Any:
    """Return a sketch that a certificate holds."""
    return np.frombuffer(base64.b64decode(text), "<i2") * scale


def compare(mark: Mapping[str, Any], value: Any, seed: int) -> tuple[bool, Any]:
    """Return whether an output is right, and its sketch beside the float model's and the certified one's."""
    certified = unpack(mark["quantized"], mark["scale"])
    is_shaped = list(np.shape(value)) == list(mark["shape"])
    if mark["labels"]:
        return is_shaped and float(np.mean(labels(value) == certified)) >= mark["tolerance"], None
    found, lost = sketch(value, len(certified), seed) if is_shaped else (0 * certified, -1)
    same = lost == mark["lost"] and mark["top"] in (-1, int(np.argmax(value)))
    right = same and decibels(certified, found) >= mark["tolerance"]
    return right, np.stack([unpack(mark["floats"], mark["scale"]), certified, found])


def judge(certificate: Mapping[str, Any], run: Callable[[dict[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
    """Run the probes, and return the outputs that are wrong and the decibels here beside those of the certificate.

    Args:
        certificate: from `read`.
        run: returns the outputs by name of inputs by name.
    """
    seen: dict[str, list[tuple[bool, Any]]] = {}
    for probe in certificate["probes"]:
        outputs = run(make_probe(certificate, probe))
        for mark in probe["outputs"]:
            seen.setdefault(mark["name"], []).append(compare(mark, outputs[mark["name"]], probe["seed"]))
    table, wrong = {}, {}
    for name, found in seen.items():
        bad, are_labels = sum(not right for right, _ in found), found[0][1] is None
        # A label may turn over by rounding.
        if bad > (len(found) // 2 if are_labels else 0):
            wrong[name] = bad
        if not are_labels:
            floats, certified, here = np.concatenate([sketches for _, sketches in found], axis=1)
            table[name] = (decibels(floats, here), decibels(floats, certified))
    worst = min(table.values(), default=(math.inf, math.inf))
    return {"right": not wrong, "wrong": wrong, "sqnr": worst[0], "certified": worst[1], "outputs": table}


def changed_data(certificate: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the files of weights beside the model that are missing or have other bytes."""
    files = [(folder / name, digest) for name, digest in certificate["data"].items()]
    return [
        file.name
        for file, digest in files
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest
    ]


def verify(model: str | Path, session: Any = None) -> dict[str, Any]:
    """Check a model file on onnxruntime; ``right`` of the result says whether it is right here.

    Args:
        model: the file.
        session: an InferenceSession of it, with the providers that the application takes; None opens one on the CPU.
    """
    certificate, digest = read(Path(model))
    if certificate is None or certificate.get("version") != VERSION:
        return {"right": False, "reason": "there is no certificate of this version"}
    if digest != certificate["graph"] or changed_data(certificate, Path(model).parent):
        return {"right": False, "reason": "the file was changed after it was certified"}
    if session is None:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    if names != certificate["outputs"]:
        return {"right": False, "reason": "the outputs have other names"}
    found = judge(certificate, lambda sample: dict(zip(names, session.run(None, sample), strict=True)))
    return {**found, "reason": f"outputs differ: {', '.join(found['wrong'])}" if found["wrong"] else ""}


if __name__ == "__main__":
    result = verify(sys.argv[1])
    sys.stdout.write(json.dumps({name: str(one) for name, one in result.items()}) + "\n")
    sys.exit(0 if result["right"] else 3)
