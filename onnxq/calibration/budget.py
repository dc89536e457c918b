"""Which tensors can be tapped at a time within a memory budget."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import onnx

from onnxq.calibration.body_taps import with_body_sizes
from onnxq.calibration.kinds import kind_named
from onnxq.calibration.requests import Request
from onnxq.calibration.segments import Segment
from onnxq.calibration.taps import tap_outputs, tapped_bytes
from onnxq.data.inputs import Sample
from onnxq.errors import DataError, SchemeError
from onnxq.runtime.sessions import open_session, run, serialized

# Bytes of a value of a body: only those of float32 tensors are carried out.
_BODY_WIDTH = 4
# Bytes of an element of nearly all tensors.
_WIDTH = 4


def tap_sizes(model: Path, sample: Sample, tensors: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each tensor in one sample, by asking the model for sizes and not for the tensors.

    Args:
        model: The float model.
        sample: Decides dimensions that the model leaves open.
        tensors: Tensors of the model; inputs, which are in memory anyway, count as nothing.

    Raises:
        ModelError: The model does not load, or a name is no tensor of it that can be observed.
        DataError: The sample does not run.
    """
    proto, inner = with_body_sizes(onnx.load(model, load_external_data=False), tensors)
    own = {value.name for value in proto.graph.output}
    computed = [name for name in tensors if name not in sample and name not in inner]
    declared = {value.name: value for value in (*proto.graph.output, *tap_outputs(proto, computed))}
    widths = dict.fromkeys(inner, _BODY_WIDTH) | {
        name: onnx.helper.tensor_dtype_to_np_dtype(declared[name].type.tensor_type.elem_type).itemsize
        for name in computed
    }
    counts = [onnx.helper.make_tensor_value_info(f"{name}/size", onnx.TensorProto.INT64, []) for name in inner]
    session = open_session(tapped_bytes(serialized(proto), counts, computed), threads=1, external_folder=model.parent)
    sizes = run(session, sample, [f"{name}/size" for name in widths])
    found = {name: int(size) * widths[name] for name, size in zip(widths, sizes, strict=True)}
    # Outputs of the model are made in any case.
    return dict.fromkeys(tensors, 0) | {name: 0 if name in own else size for name, size in found.items()}


def tap_groups(sizes: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], ...]:
    """Split tensors, in their order, into groups of at most `limit` bytes.

    Raises:
        DataError: A tensor alone is larger.

    >>> tap_groups({"a": 3, "b": 2, "c": 4}, 5)
    (('a', 'b'), ('c',))
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if size > limit:
            raise DataError(
                f"Tensor {name!r} takes {size} bytes, expected at most the {max(limit, 0)} that the memory budget "
                "leaves beside the model and its samples; raise the budget"
            )
        if used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return tuple(tuple(group) for group in groups)


def tap_passes(
    parts: Sequence[Segment], sizes: Mapping[str, int], names: Collection[str], limit: int
) -> tuple[tuple[str, ...], ...]:
    """Split tensors into passes over the samples: in none does a segment of the model hold more than `limit` bytes.

    Args:
        parts: The model with all tensors tapped; a pass lets go of a segment's tensors before the next segment runs.
        sizes: Bytes of all tapped tensors, see `tap_sizes`.
        names: The tensors to observe.
        limit: Bytes for the tensors of a segment and those that cross its ends.

    Raises:
        DataError: A tensor alone is larger than what crosses leaves.
    """
    computed = {name for part in parts for name in part.outputs}
    passes = [[name for name in names if name not in computed]]
    for part in parts:
        given = {name: sizes[name] for name in part.outputs if name in names}
        for index, group in enumerate(tap_groups(given, limit - _crossing(part, sizes))):
            if index == len(passes):
                passes.append([])
            passes[index] += group
    return tuple(tuple(group) for group in passes)


def hungriest(parts: Sequence[Segment], sizes: Mapping[str, int], names: Collection[str]) -> tuple[str, int]:
    """Return the tensor that takes the most bytes together with what crosses its segment, and these bytes.

    With a smaller limit there are no `tap_passes`. The name is empty where nothing is computed.

    Args:
        parts: As for `tap_passes`.
        sizes: As for `tap_passes`.
        names: As for `tap_passes`.
    """
    taken = {name: _crossing(part, sizes) + sizes[name] for part in parts for name in part.outputs if name in names}
    return max(taken.items(), key=lambda item: item[1], default=("", 0))


def evidence_bytes(requests: Iterable[Request], sizes: Mapping[str, int], samples: int) -> dict[str, int]:
    """Return about how many bytes the statistics of each tensor take.

    Args:
        requests: What is wanted of tensors.
        sizes: Bytes of the tensors in one sample, see `tap_sizes`.
        samples: How many samples are seen.
    """
    found: dict[str, int] = {}
    for request in requests:
        kept = kind_named(request.kind).bytes_kept(request, sizes[request.tensor] // _WIDTH, samples)
        found[request.tensor] = found.get(request.tensor, 0) + kept
    return found


def largest_segment(parts: Sequence[Segment], sizes: Mapping[str, int]) -> int:
    """Return the bytes that one pass over all tensors holds at most."""
    return max(_crossing(part, sizes) + sum(sizes.get(name, 0) for name in part.outputs) for part in parts)


def _crossing(part: Segment, sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(name, 0) for name in part.kept.union(part.inputs))


def peak_memory() -> int:
    """Return the most bytes that this process has had in memory so far.

    Raises:
        SchemeError: The system does not tell.
    """
    try:
        import resource
    except ImportError as error:
        raise SchemeError("This system tells no memory use, expected it for a memory budget; leave it out") from error
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
