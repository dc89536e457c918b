"""Operators that move elements, or tell and make shapes: one line each where torch has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor

from onnxq.training.calls import Call

Function = Callable[[Call], Any]


def _reshape(call: Call) -> Tensor:
    wanted, data = call.numbers(1, "shape") or [], call[0]
    if not call.attribute("allowzero", 0):
        wanted = [data.shape[axis] if extent == 0 else extent for axis, extent in enumerate(wanted)]
    return data.reshape(wanted)


def _flatten(call: Call) -> Tensor:
    axis, shape = call.attribute("axis", 1), call[0].shape
    rows = math.prod(shape[: axis if axis >= 0 else len(shape) + axis])
    return call[0].reshape(rows, -1 if rows else math.prod(shape))


def _squeeze(call: Call) -> Tensor:
    axes = call.numbers(1, "axes")
    return call[0].squeeze() if axes is None else call[0].squeeze(axes)


def _unsqueeze(call: Call) -> Tensor:
    data, axes = call[0], call.numbers(1, "axes") or []
    rank = data.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        data = data.unsqueeze(axis)
    return data


def _transpose(call: Call) -> Tensor:
    return call[0].permute(call.attribute("perm", list(reversed(range(call[0].ndim)))))


def _shape(call: Call) -> Tensor:
    shape = torch.tensor(call[0].shape, dtype=torch.int64, device=call[0].device)
    return shape[call.attribute("start", 0) : call.attribute("end")]


def _slice(call: Call) -> Tensor:
    data, starts, ends = call[0], call.numbers(1, "starts") or [], call.numbers(2, "ends") or []
    axes, steps = call.numbers(3, "axes") or list(range(len(starts))), call.numbers(4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step > 0:
            places = [slice(None)] * data.ndim
            places[axis] = slice(start, end, step)
            data = data[tuple(places)]
        else:
            # torch has no slice that walks back.
            wanted = list(range(data.shape[axis]))[slice(start, None if end < -data.shape[axis] else end, step)]
            data = data.index_select(axis, torch.tensor(wanted, dtype=torch.int64, device=data.device))
    return data


def _split(call: Call) -> tuple[Tensor, ...]:
    data, axis, count = call[0], call.attribute("axis", 0), len(call.node.outputs)
    parts = call.numbers(1, "split")
    found: tuple[Tensor, ...] = data.split(-(-data.shape[axis] // count) if parts is None else parts, axis)
    return found


def _gather(call: Call) -> Tensor:
    data, indices, axis = call[0], call[1].to(torch.int64), call.attribute("axis", 0) % call[0].ndim
    indices = torch.where(indices < 0, indices + data.shape[axis], indices)
    found = data.index_select(axis, indices.reshape(-1))
    return found.reshape((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]))


def _gather_elements(call: Call) -> Tensor:
    axis, indices = call.attribute("axis", 0), call[1].to(torch.int64)
    return torch.gather(call[0], axis, torch.where(indices < 0, indices + call[0].shape[axis], indices))


def _gather_nd(call: Call) -> Tensor:
    data, indices, batch = call[0], call[1].to(torch.int64), call.attribute("batch_dims", 0)
    lead, depth = data.shape[:batch], indices.shape[-1]
    flat, places = data.reshape((-1, *data.shape[batch:])), indices.reshape(math.prod(lead), -1, depth)
    found = torch.stack([rows[tuple(place.unbind(-1))] for rows, place in zip(flat, places, strict=True)])
    return found.reshape((*indices.shape[:-1], *data.shape[batch + depth :]))


def _filled(call: Call) -> Tensor:
    value = call.attribute("value")
    made = torch.zeros(1) if value is None else torch.from_numpy(value.copy())
    return made.to(call[0].device).expand(call.numbers(0) or []).clone()


def _constant(call: Call) -> Tensor:
    given = next(call.attribute(name) for name in call.node.attrs)
    if isinstance(given, (int, float, list)):
        whole = isinstance(given, int) or (isinstance(given, list) and all(isinstance(one, int) for one in given))
        return torch.tensor(given, dtype=torch.int64 if whole else torch.float32)
    return torch.from_numpy(given.copy())


def _expand(call: Call) -> Tensor:
    return call[0].expand(torch.broadcast_shapes(call[0].shape, call.numbers(1) or []))


def _pad(call: Call) -> Tensor:
    data, pads, axes = call[0], call.numbers(1, "pads") or [], call.numbers(3)
    mode = {"constant": "constant", "edge": "replicate", "reflect": "reflect", "wrap": "circular"}
    around = dict.fromkeys(range(data.ndim), (0, 0))
    for place, axis in enumerate(range(data.ndim) if axes is None else axes):
        around[axis % data.ndim] = pads[place], pads[place + len(pads) // 2]
    kind = mode[call.attribute("mode", "constant")]
    if kind == "constant":
        flat = [extent for axis in reversed(range(data.ndim)) for extent in around[axis]]
        return f.pad(data, flat, value=call.number(2, "value", 0.0))
    # torch pads the last axes of data with a batch and channels alone.
    for axis, (before, after) in around.items():
        if before or after:
            turned = data.movedim(axis, -1)
            padded = f.pad(turned.reshape(1, -1, turned.shape[-1]), (before, after), mode=kind)
            data = padded.reshape(*turned.shape[:-1], -1).movedim(-1, axis)
    return data


def _range(call: Call) -> Tensor:
    return torch.arange(call[0].item(), call[1].item(), call[2].item(), dtype=call[0].dtype, device=call[0].device)


def _tile(call: Call) -> Tensor:
    return call[0].repeat(call.numbers(1) or [])


def _one_hot(call: Call) -> Tensor:
    depth, axis = int(call[1].item()), call.attribute("axis", -1)
    place = call[0].to(torch.int64)
    within = ((place >= -depth) & (place < depth)).unsqueeze(-1)
    hot = f.one_hot(place % depth, depth).bool() & within
    return torch.where(hot, call[2][1], call[2][0]).movedim(-1, axis)


def _top(call: Call) -> tuple[Tensor, Tensor]:
    count = (call.numbers(1, "k") or [call.attribute("k", 1)])[0]
    axis, largest = call.attribute("axis", -1), bool(call.attribute("largest", 1))
    # Of equal values the first come first, which torch.topk does not promise.
    found = torch.sort(call[0], dim=axis, descending=largest, stable=True)
    return found.values.narrow(axis, 0, count), found.indices.narrow(axis, 0, count)


def _triangle(call: Call) -> Tensor:
    diagonal = 0 if call.optional(1) is None else int(call[1].item())
    return (torch.triu if call.attribute("upper", 1) else torch.tril)(call[0], diagonal)


def _depth_to_space(call: Call) -> Tensor:
    (batch, channels, height, width), size = call[0].shape, call.attribute("blocksize")
    inner = channels // size**2
    if call.attribute("mode", "DCR") == "DCR":
        parts = call[0].reshape(batch, size, size, inner, height, width).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = call[0].reshape(batch, inner, size, size, height, width).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(batch, inner, height * size, width * size)


def _space_to_depth(call: Call) -> Tensor:
    (batch, channels, height, width), size = call[0].shape, call.attribute("blocksize")
    parts = call[0].reshape(batch, channels, height // size, size, width // size, size).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(batch, channels * size**2, height // size, width // size)


def _scatter_elements(call: Call) -> Tensor:
    data, axis, indices = call[0], call.attribute("axis", 0), call[1].to(torch.int64)
    indices = torch.where(indices < 0, indices + data.shape[axis], indices)
    how = {"none": None, "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[call.attribute("reduction", "none")]
    if how is None:
        return data.scatter(axis, indices, call[2])
    return data.scatter_reduce(axis, indices, call[2], how)


MOVING: Mapping[str, Function] = MappingProxyType(
    {
        "Concat": lambda call: torch.cat(call.given, call.attribute("axis")),
        "Constant": _constant,
        "ConstantOfShape": _filled,
        "DepthToSpace": _depth_to_space,
        "Expand": _expand,
        "Flatten": _flatten,
        "Gather": _gather,
        "GatherElements": _gather_elements,
        "GatherND": _gather_nd,
        "NonZero": lambda call: torch.nonzero(call[0]).T,
        "OneHot": _one_hot,
        "Pad": _pad,
        "Range": _range,
        "Reshape": _reshape,
        "ScatterElements": _scatter_elements,
        "Shape": _shape,
        "Size": lambda call: torch.tensor(call[0].numel(), device=call[0].device),
        "Slice": _slice,
        "SpaceToDepth": _space_to_depth,
        "Split": _split,
        "Squeeze": _squeeze,
        "Tile": _tile,
        "TopK": _top,
        "Transpose": _transpose,
        "Trilu": _triangle,
        "Unsqueeze": _unsqueeze,
    }
)
"""The function of each operator of ONNX's own domain by its name."""
