"""Quantize and pack one weight to every format, beside memcpy and onnxruntime's own quantizers.

    python benchmarks/pack.py [--rows 4096] [--columns 4096] [--block 32] [--repeat 7] [FORMAT ...]

The weight is float32, a matrix of a MatMul: blocks lie along its rows. Ours is numpy on one thread, from the weight to
the bytes of the initializer (``pack``), and from there to the layout of MatMulNBits (``blob``) where that kernel reads
the format. The peer is ``quantize_matmul_{2,4,8}bits`` of onnxruntime, symmetric, straight to that layout; the column
``threads`` is the processor time that it takes in a second. All are timed in turn, and medians are shown: gigabytes of
float32 weight in a second. ``memory`` is what encoding and packing allocate at most, in sizes of the weight.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from onnxq.algorithms.encoders import encode_array
from onnxq.numerics.affine import QTensor
from onnxq.numerics.formats import FORMATS, QuantDType
from onnxq.numerics.ort_packing import pack_matmul_nbits
from onnxq.numerics.packing import pack
from onnxq.numerics.spec import QuantSpec

Weight = npt.NDArray[np.float32]
Work = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=[name for name in FORMATS if name != "int32"])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    shape = options.rows, options.columns
    weight = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    print(f"weight {options.rows}x{options.columns} float32, blocks of {options.block} along axis 0, ours on 1 thread")
    print(
        f"{'format':14} {'memcpy':>7} {'pack':>7} {'blob':>7} {'peer':>7} {'threads':>7} {'pack/peer':>9} {'memory':>7}"
    )
    for name in options.formats:
        print(row(FORMATS[name], weight, options.block, options.repeat))


def row(format: QuantDType, weight: Weight, block: int, repeat: int) -> str:
    """Return one line of the table: all ways to pack one format, in turn."""
    target = np.empty_like(weight)
    options: dict[str, Work] = {
        "memcpy": lambda: np.copyto(target, weight),
        "pack": lambda: packed(weight, format, block),
    }
    if not format.is_float and format.bits in (2, 4, 8):
        options["blob"] = lambda: pack_matmul_nbits(encoded(weight, format, block), block)
        options["peer"] = peer(weight, format.bits, block)
    seconds, threads = timed(options, repeat)
    speed = {way: weight.nbytes / 1e9 / taken for way, taken in seconds.items()}
    shown = {way: f"{speed[way]:.2f}" if way in speed else "-" for way in ("memcpy", "pack", "blob", "peer")}
    ratio = f"{speed['pack'] / speed['peer']:.2f}" if "peer" in speed else "-"
    share = f"{threads['peer']:.1f}" if "peer" in threads else "-"
    return (
        f"{format.name:14} "
        + " ".join(f"{shown[way]:>7}" for way in shown)
        + f" {share:>7} {ratio:>9} {peak_memory(options['pack']) / weight.nbytes:>7.2f}"
    )


def encoded(weight: Weight, format: QuantDType, block: int) -> QTensor:
    spec = QuantSpec(format.name, granularity=(block,), symmetric=format.signed)
    return encode_array(weight, spec, channel_axis=1, reduction_axis=0)


def packed(weight: Weight, format: QuantDType, block: int) -> object:
    tensor = encoded(weight, format, block)
    return pack(tensor.values, format), tensor.parameters


def peer(weight: Weight, bits: int, block: int) -> Work:
    """Return the work of onnxruntime's quantizer, into arrays that are there already."""
    from onnxruntime.capi import _pybind_state

    quantizer = getattr(_pybind_state, f"quantize_matmul_{bits}bits")
    rows, columns = weight.shape
    blocks = -(-rows // block)
    quantized = np.zeros((columns, blocks, block * bits // 8), np.uint8)
    scales = np.zeros((columns, blocks), np.float32)
    zero_points = np.zeros((columns, -(-blocks * bits // 8)), np.uint8)
    return lambda: quantizer(quantized, weight, scales, zero_points, block, columns, rows, True)


def timed(options: Mapping[str, Work], repeat: int) -> tuple[dict[str, float], dict[str, float]]:
    """Run all ways in turn; return the median seconds of each, and its processor time over them."""
    wall: dict[str, list[float]] = {way: [] for way in options}
    processor: dict[str, list[float]] = {way: [] for way in options}
    for turn in range(repeat + 1):
        for way, work in options.items():
            start, busy = time.perf_counter(), time.process_time()
            work()
            # The first turn touches new memory.
            if turn:
                wall[way].append(time.perf_counter() - start)
                processor[way].append(time.process_time() - busy)
    seconds = {way: statistics.median(taken) for way, taken in wall.items()}
    return seconds, {way: sum(processor[way]) / sum(wall[way]) for way in options}


def peak_memory(work: Work) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    main()
