"""The origin of statistics: digests of the model and of each sample, and what ran them."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.errors import DataError, ModelError
from onnxq.ir.external_data import DataFolder, Stamp
from onnxq.ir.stored_tensors import stored_tensors
from onnxq.ir.tensor_data import ProtoTensor
from onnxq.ops import OPERATORS
from onnxq.system.resources import parallel_map

_BLOCK = 1 << 20
# The scales of a Resize or the bounds of a Slice have no more.
_FEW_NUMBERS = 16
_DIGEST_BYTES = 16
# Larger tensors are hashed by threads of their own.
_LARGE_BYTES = 1 << 20
# Hashes of large tensors by version of the file, offset and length: a prepared model links to the data it came from.
_HASHES: dict[tuple[Stamp, int, int], bytes] = {}
_MOST_HASHES = 1 << 14
# Instruction sets that decide which kernels a runtime chooses, best first.
_INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "avx", "sve", "i8mm", "asimddp", "asimd")


@dataclass(frozen=True)
class Provenance:
    """The model of statistics, and what ran it; empty if not recorded.

    Args:
        model: Digest of the float model, see `model_digest`.
        runtime: The runtime, see `onnxq.runtime.sessions.runtime_version`; another one rounds differently.
        machines: Instruction sets of the processors in rising order, see `instruction_set`. The last bits of statistics
            may differ between them.
    """

    model: str = ""
    runtime: str = ""
    machines: tuple[str, ...] = ()

    def merge(self, other: Provenance) -> Provenance:
        """Return the provenance of merged statistics.

        Raises:
            DataError: The models or runtimes differ.
        """
        if self.model and other.model and self.model != other.model:
            raise DataError(
                f"Statistics of model {self.model[:12]} and of model {other.model[:12]} cannot be merged, expected one "
                "model; calibrate both shards on the same file"
            )
        if self.runtime and other.runtime and self.runtime != other.runtime:
            raise DataError(
                f"Statistics of {self.runtime} and of {other.runtime} cannot be merged, expected one version; "
                "calibrate both shards with the same"
            )
        machines = tuple(sorted({*self.machines, *other.machines}))
        return Provenance(self.model or other.model, self.runtime or other.runtime, machines)


@cache
def instruction_set() -> str:
    """Return the type and the widest vector instructions of this processor, as in ``x86_64 avx512_vnni``."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        # Only Linux has this file.
        words = set()
    widest = next((name for name in _INSTRUCTIONS if name in words), "")
    return f"{platform.machine()} {widest}".strip()


def sample_digest(sample: Mapping[str, NDArray[Any]]) -> str:
    """Return a digest of the names, types, shapes and values of a sample.

    >>> sample_digest({"x": np.zeros(2)}) == sample_digest({"x": np.zeros((2, 1))})
    False
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(sample):
        value = np.asarray(sample[name])
        if value.dtype.hasobject:
            value = value.astype(str)
        digest.update(repr((name, value.dtype.str, value.dtype.name, value.shape)).encode())
        if value.size:
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def model_digest(model: onnx.ModelProto | Path) -> str:
    """Return a digest of what a model computes: its nodes and weights, including external data.

    Weights are read block by block, and large ones by several threads. The opset, declared types of inner tensors, and
    documentation or metadata are left out. For a model in memory with external data, the references to it count.

    Raises:
        ModelError: A file cannot be read, or a tensor is damaged.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    folder = DataFolder.of_model(model) if isinstance(model, Path) else None
    proto = model if isinstance(model, onnx.ModelProto) else onnx.load(model, load_external_data=False)
    initializers = (ProtoTensor(tensor, folder) for tensor in proto.graph.initializer)
    hashed = parallel_map(_sha1, (one for one in initializers if one.nbytes >= _LARGE_BYTES))
    for field, part in _content(proto):
        payloads = [ProtoTensor(tensor, folder) for tensor in stored_tensors(part)]
        described = _without_values(part).SerializeToString(deterministic=True)
        digest.update(f"{field} {len(described)} ".encode())
        digest.update(described)
        for tensor_data in payloads:
            if tensor_data.nbytes < _LARGE_BYTES:
                for values in _values(tensor_data):
                    digest.update(values)
            else:
                digest.update(next(hashed) if field == "initializer" else _sha1(tensor_data))
    return digest.hexdigest()


def _sha1(tensor_data: ProtoTensor) -> bytes:
    """Return a hash of the values of a large tensor; processors have instructions for this one."""
    key = None
    if tensor_data.external and tensor_data.folder is not None:
        place = tensor_data.data_range()
        key = place.stamp, place.offset, place.length
        if (known := _HASHES.get(key)) is not None:
            return known
    digest = hashlib.sha1(usedforsecurity=False)
    for values in _values(tensor_data):
        digest.update(values)
    if key is not None:
        if len(_HASHES) >= _MOST_HASHES:
            _HASHES.clear()
        _HASHES[key] = digest.digest()
    return digest.digest()


def structure_digest(path: Path) -> str:
    """Return a digest of what the time of a model depends on: its nodes, and the types and shapes of its weights.

    Values count where they decide sizes: 64-bit integers, and a few numbers of operators such as Resize, Slice and Pow.
    Models of one architecture that were trained apart have the same digest if their nodes and inner tensors have the
    same names.

    Raises:
        ModelError: External data cannot be read, or a tensor is damaged.
    """
    folder = DataFolder.of_model(path)
    proto = onnx.load(path, load_external_data=False)

    def look(tensor: onnx.TensorProto, most: int = 0) -> str:
        counts = tensor.data_type == onnx.TensorProto.INT64 or math.prod(tensor.dims) <= most
        values = b"".join(_values(ProtoTensor(tensor, folder))) if counts else b""
        return repr((tensor.data_type, list(tensor.dims), values))

    looks = {tensor.name: look(tensor) for tensor in proto.graph.initializer}
    valued = {tensor.name: look(tensor, _FEW_NUMBERS) for tensor in proto.graph.initializer}

    def unname(nodes: Iterable[onnx.NodeProto]) -> None:
        """Put looks in the place of the names of initializers: which nodes share one depends on its values."""
        for node in nodes:
            row = OPERATORS.get((node.domain, node.op_type))
            decides = row is not None and (row.moves or row.precision_sensitive)
            node.input[:] = [(valued if decides else looks).get(name, name) for name in node.input]
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs):
                    unname(body.node)

    unname(proto.graph.node)
    del proto.graph.initializer[:]
    opsets = sorted((entry.domain, entry.version) for entry in proto.opset_import)
    digest = hashlib.blake2b(repr(opsets).encode(), digest_size=_DIGEST_BYTES)
    for field, part in _content(proto):
        described = _without_values(part).SerializeToString(deterministic=True)
        digest.update(f"{field} {len(described)} ".encode())
        digest.update(described)
        for tensor in stored_tensors(part):
            digest.update(look(tensor).encode())
    return digest.hexdigest()


def _content(model: onnx.ModelProto) -> Iterator[tuple[str, Any]]:
    """Yield the parts that decide what a model computes, one by one, so that not all weights are copied at once."""
    graph = model.graph
    for node in graph.node:
        bare = onnx.NodeProto()
        bare.CopyFrom(node)
        for field in ("doc_string", "metadata_props"):
            bare.ClearField(field)
        yield "node", bare
    yield from (("function", function) for function in model.functions)
    yield from (("initializer", tensor) for tensor in graph.initializer)
    yield from (("sparse", tensor) for tensor in graph.sparse_initializer)
    yield from (("input", onnx.ValueInfoProto(name=value.name, type=value.type)) for value in graph.input)
    yield from (("output", onnx.ValueInfoProto(name=value.name)) for value in graph.output)


def _without_values(part: Any) -> Any:
    """Return a part of a model whose tensors have neither values nor their location."""
    bare = type(part)()
    if isinstance(part, onnx.TensorProto):
        ProtoTensor(part).fill_without_values(bare, part.name)
        return bare
    bare.CopyFrom(part)
    for tensor in stored_tensors(bare):
        tensor.CopyFrom(_without_values(tensor))
    return bare


def _values(tensor_data: ProtoTensor) -> Iterator[bytes | memoryview]:
    if tensor_data.onnx_dtype == onnx.TensorProto.STRING:
        yield repr(list(tensor_data.proto.string_data)).encode()
    elif not tensor_data.external:
        yield from tensor_data.chunks()
    elif tensor_data.folder is None:
        yield from (entry.SerializeToString(deterministic=True) for entry in tensor_data.proto.external_data)
    else:
        # Read blocks, since mapped chunks would count as memory of this process.
        place = tensor_data.data_range()
        yield from _blocks(place.path, place.offset, place.length)


def _blocks(path: Path, offset: int, left: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            while block := stream.read(min(_BLOCK, left)):
                left -= len(block)
                yield block
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; expected a file of the model") from error
