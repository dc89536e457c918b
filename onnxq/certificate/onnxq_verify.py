"""Check a model against the certificate that onnxq wrote into it, with numpy and onnxruntime alone.

Copy this file into an application, and call `verify` at install or at the first load, or run it::

    python onnxq_verify.py model.onnx

A certificate is no signature: it finds damage and runtimes that compute something else, not forgery.
"""

import base64
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

KEY, VERSION = "onnxq.certificate", 1
_METADATA, _SIGNS, _HUGE, _LEAST = 14, 0xFFFF, 1e30, 1e-300


def read(model: bytes) -> tuple[Any, str]:
    """Return the certificate of a model, and the SHA-256 of all its fields but the metadata_props."""
    place, digest, certificate = 0, hashlib.sha256(), None
    while place < len(model):
        start = place
        tag, place = _varint(model, place)
        if tag & 5:
            raise ValueError("it is not an ONNX model")
        size, content = _varint(model, place)
        place = content + size if tag & 2 else content
        if tag >> 3 != _METADATA:
            digest.update(memoryview(model)[start:place])
        elif model.startswith(KEY.encode(), content + 2):
            certificate = json.loads(model[model.index(b'{"', content) : place])
    return certificate, digest.hexdigest()


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while data[place] > 127:
        value, place, shift = value | (data[place] & 127) << shift, place + 1, shift + 7
    return value | data[place] << shift, place + 1


def mix(values: Any) -> Any:
    """Return 32 pseudo-random bits for each uint32: the hash lowbias32 of Chris Wellons' hash-prospector."""
    values = (values ^ values >> 16) * np.uint32(0x7FEB352D)
    values = (values ^ values >> 15) * np.uint32(0x846CA68B)
    return values ^ values >> 16


def _key(seed: int, stream: int) -> Any:
    return mix(np.array([seed << 16 | stream], np.uint32))


def make_input(recipe: Mapping[str, Any], seed: int, stream: int) -> Any:
    """Return the values of an input, the same bits wherever they are made.

    Each is a random entry of a table. Neighbours in a cell share it, but each 16th element has its own.
    """
    shape, rows, tables = recipe["shape"], recipe["rows"], recipe["tables"]
    place = np.arange(math.prod(shape), dtype=np.uint32)
    cell, stride = place, 1
    for dim, grain in zip(shape[::-1], recipe["grain"][::-1], strict=True):
        # Every third seed has cells of twice, and of four times the size.
        cell = cell - place // stride % dim % (grain << seed % 3 if grain > 1 else 1) * stride
        stride *= dim
    own, shared = mix(place ^ _key(seed, 2 * stream)), mix(cell ^ _key(seed, 2 * stream + 1))
    if recipe["type"] == "string":
        table = np.array(tables, object)
    else:
        table = np.frombuffer(base64.b64decode(tables[seed % len(tables)]), recipe["type"])
    drawn, table = np.where(own & 15 == 0, own, shared) >> 8, table.reshape(rows, -1)
    return table[place // recipe["stride"] % rows, drawn % table.shape[1]].reshape(shape)


def make_probe(certificate: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the inputs of a probe by name."""
    return {recipe["name"]: make_input(recipe, seed, stream) for stream, recipe in enumerate(certificate["inputs"])}


def sketch(values: Any, buckets: int, seed: int) -> tuple[Any, int]:
    """Return sums of randomly signed elements in buckets, and the number of finite elements.

    The squares of the sums add up to the squared norm, as far as signs are random (count sketch, Charikar et al. 2002).
    Elements that are no floats count by their hash.
    """
    flat = np.asarray(values).reshape(-1)
    if flat.dtype.kind in "OSU":
        flat = np.array([sum(text.encode()) for text in flat], np.int64)
    if flat.dtype.kind in "iub":
        flat = mix(flat.astype(np.int64).astype(np.uint32)) - 2.0**31
    flat, place = flat.astype(np.float64), np.arange(flat.size, dtype=np.uint32)
    # Larger magnitudes stand for infinity, as masks do; their squares would hide everything else.
    kept = np.abs(flat) < _HUGE
    signed = np.where(kept, np.where(mix(place ^ _key(seed, _SIGNS)) & 1, -flat, flat), 0)
    return np.bincount(place % buckets, signed, buckets), int(kept.sum())


def floats_of(values: Any, quantizer: Any) -> Any:
    """Return the floats of quantized values, given their scale and zero point; without these, the values."""
    return values if quantizer is None else quantizer[0] * (np.asarray(values, np.float64) - quantizer[1])


def decibels(wanted: Any, actual: Any) -> float:
    """Return the signal-to-noise ratio of sketches, infinite if they are equal."""
    signal, noise = float(np.square(wanted).sum()), float(np.square(actual - wanted).sum())
    return 10 * math.log10(max(signal, _LEAST) / noise) if noise else math.inf


def judge(certificate: Mapping[str, Any], run: Callable[[dict[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
    """Run the probes, and return the outputs that are wrong and the decibels here beside those of the certificate.

    Args:
        certificate: from `read`.
        run: returns the outputs by name of inputs by name.
    """
    seeds, quantized, table, wrong = certificate["seeds"], certificate.get("quantized", {}), {}, {}
    runs = [run(make_probe(certificate, seed)) for seed in seeds]
    for mark in certificate["fingerprints"]:
        name, packed = mark["name"], (base64.b64decode(mark[part]) for part in ("floats", "quantized"))
        floats, certified = (np.frombuffer(stored, "<i2").reshape(len(seeds), -1) * mark["scale"] for stored in packed)
        values = (floats_of(outputs[name], quantized.get(name)) for outputs in runs)
        sketches = [sketch(output, certified.shape[1], seed) for output, seed in zip(values, seeds, strict=True)]
        marks = zip(certified, mark["finite"], mark["tolerances"], sketches, strict=True)
        bad = sum(finite != count or decibels(sums, here) < least for sums, count, least, (here, finite) in marks)
        if bad > mark["spare"]:
            wrong[name] = bad
        table[name] = decibels(floats, np.array([here for here, _ in sketches])), decibels(floats, certified)
    sqnr, usual = min(table.values(), default=(math.inf, math.inf))
    return {"right": not wrong, "wrong": wrong, "sqnr": sqnr, "certified": usual, "outputs": table}


def changed_data(certificate: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the files of weights beside the model that are missing or have other bytes."""
    digests = ((folder / name, digest) for name, digest in certificate["data"].items())
    return [file.name for file, digest in digests if not file.is_file() or file_digest(file) != digest]


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(model: str | Path, session: Any = None) -> dict[str, Any]:
    """Check a model file on onnxruntime; ``right`` of the result says whether it is right here.

    Args:
        model: the file.
        session: an InferenceSession of it, with the providers that the application takes; None opens one on the CPU.
    """
    certificate, digest = read(Path(model).read_bytes())
    if certificate is None or certificate.get("version") != VERSION:
        return {"right": False, "reason": "the model has no certificate that this checker reads"}
    if digest != certificate["graph"] or changed_data(certificate, Path(model).parent):
        return {"right": False, "reason": "the file was changed after it was certified"}
    if session is None:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = certificate["outputs"]
    if names != [output.name for output in session.get_outputs()]:
        return {"right": False, "reason": "the outputs have other names"}
    verdict = judge(certificate, lambda sample: dict(zip(names, session.run(names, sample), strict=True)))
    return {**verdict, "reason": f"outputs differ: {', '.join(verdict['wrong'])}" if verdict["wrong"] else ""}


def to_json(result: Any) -> str:
    """Return a result as JSON, the same as of onnxq-verify.mjs; infinite decibels become "inf"."""
    if isinstance(result, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{to_json(value)}' for name, value in result.items())}}}"
    if isinstance(result, tuple):
        return f"[{','.join(map(to_json, result))}]"
    return json.dumps("inf" if result == math.inf else result)


def main() -> None:
    """Check the model that the command line names, and print the result as JSON."""
    try:
        result = verify(sys.argv[1])
    except (ImportError, IndexError, OSError) as error:
        missing = "name a model: python onnxq_verify.py model.onnx" if isinstance(error, IndexError) else str(error)
        install = "; run pip install onnxruntime" if isinstance(error, ImportError) else ""
        sys.stderr.write(f"onnxq_verify.py: {missing}{install}\n")
        sys.exit(2)
    sys.stdout.write(f"{to_json(result)}\n")
    sys.exit(0 if result["right"] else 3)


if __name__ == "__main__":
    main()
