"""Serve OpenVINO on the CPU; the process needs only openvino and numpy."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from onnxq.runtime.protocol import Array, Backend, Loaded, serve

# Such as "Check 'false' failed at src/frontends/onnx/frontend/src/core/graph.cpp:151:".
_SOURCE_PLACE = re.compile(r"(?:Exception from|Check '[^']*' failed at) \S+:\d+:")
_CONVERTER = "openvino.tools.ovc"
# Bytes in a model file that refers to external data.
_ELSEWHERE = b"\n\x08location"


class OpenVino(Backend):
    """OpenVINO's CPU device, one request at a time."""

    profiles = True

    def __init__(self, precision: str = "") -> None:
        """Set the precision, such as ``f32``; empty leaves it to OpenVINO: bfloat16 on processors that multiply it."""
        # Block its converters of other formats: serving does not need them, and their import takes as long as the rest.
        sys.modules.setdefault(_CONVERTER, None)  # type: ignore[arg-type]
        import openvino

        self.core, self.precision = openvino.Core(), precision
        self.compiled_before = tempfile.TemporaryDirectory()
        self.first_with: dict[bytes, tuple[str, Path]] = {}
        self.made_of: dict[Path, dict[str, tuple[list[str], list[str]]]] = {}
        computes_in = precision or self.core.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
        self.version = f"openvino {openvino.__version__.split('-')[0]} in {computes_in}"

    def load(self, model: str, threads: int | None) -> Loaded:
        """Load a model file; loading it again, as each round of timing does, takes a quarter of the time."""
        return _Session(self._kept(self._same(model), threads))

    def _kept(self, model: str, threads: int | None, **options: Any) -> Any:
        # A model from the cache has lost some names of fused nodes, so keep those of the first compilation.
        place = self._place(model)
        compiled = self._compiled(model, threads, CACHE_DIR=str(place), **options)
        if place not in self.made_of:
            self.made_of[place] = {
                node.friendly_name: ([value.get_node().friendly_name for value in node.input_values()], _fused(node))
                for node in compiled.get_runtime_model().get_ops()
            }
        return compiled

    def _same(self, model: str) -> str:
        # A chosen plan is written a second time, so use the first file with the same bytes.
        data = Path(model).read_bytes()
        if _ELSEWHERE in data:
            return model
        first, place = self.first_with.setdefault(hashlib.sha256(data).digest(), (model, self._place(model)))
        return first if Path(first).exists() and self._place(first) == place else model

    def _place(self, model: str) -> Path:
        return Path(self.compiled_before.name, str(Path(model).stat().st_mtime_ns))

    def profile(
        self, model: str, samples: Sequence[Mapping[str, Array]], repeats: int, threads: int
    ) -> tuple[Mapping[str, Any], Sequence[Array]]:
        """Return the kernels that ran; outputs of a kernel name all nodes fused into it, inputs name kernels."""
        same = self._same(model)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(self._sizes, model, samples)
            compiled = self._kept(same, threads, PERF_COUNT=True)
            sizes = pending.result()
        made_of = self.made_of[self._place(same)]
        request = compiled.create_infer_request()
        # The first runs are slower, of float models too.
        for _ in range(repeats):
            request.infer(dict(samples[0]))
        times: dict[str, list[float]] = {}
        kinds: dict[str, str] = {}
        for sample in samples:
            runs: dict[str, list[float]] = {}
            for _ in range(repeats):
                request.infer(dict(sample))
                for event in request.profiling_info:
                    if event.status.name == "EXECUTED":
                        runs.setdefault(event.node_name, []).append(event.real_time.total_seconds() * 1e9)
                        kinds[event.node_name] = event.node_type
            for name, durations in runs.items():
                times.setdefault(name, []).append(min(durations))
        kernels = []
        for name, durations in times.items():
            inputs, fused = made_of.get(name, ([], []))
            kernels.append(
                {
                    "name": name,
                    "op_type": kinds[name],
                    "inputs": inputs,
                    "outputs": [name, *fused],
                    "nanoseconds": sum(durations) / len(samples),
                    "elements": max(sizes.get(part, 0.0) for part in (name, *fused)),
                }
            )
        return {"kernels": kernels}, ()

    def _sizes(self, model: str, samples: Sequence[Mapping[str, Array]]) -> dict[str, float]:
        sizes: dict[str, float] = {}
        read = self.core.read_model(model)
        for sample in samples:
            read.reshape({name: list(array.shape) for name, array in sample.items()})
            for node in read.get_ordered_ops():
                if node.get_output_size() and node.get_output_partial_shape(0).is_static:
                    size = math.prod(node.get_output_shape(0)) / len(samples)
                    sizes[node.friendly_name] = sizes.get(node.friendly_name, 0.0) + size
        return sizes

    def _compiled(self, model: str, threads: int | None, **options: Any) -> Any:
        settings = {"PERFORMANCE_HINT": "LATENCY", **options}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = threads
        if self.precision:
            settings["INFERENCE_PRECISION_HINT"] = self.precision
        try:
            return self.core.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            raise RuntimeError(_SOURCE_PLACE.sub("", str(error))) from None


class _Session:
    def __init__(self, compiled: Any) -> None:
        self.request = compiled.create_infer_request()
        self.outputs = [_name(output) for output in compiled.outputs]

    def run(self, sample: Mapping[str, Array]) -> Sequence[Array]:
        try:
            # A call of a compiled model shares inputs too; copying a large input takes longer than some layers.
            results = self.request.infer(dict(sample), share_inputs=True)
        except RuntimeError as error:
            raise RuntimeError(_SOURCE_PLACE.sub("", str(error))) from None
        return [results[number].copy() for number in range(len(self.outputs))]


def _fused(node: Any) -> list[str]:
    info = node.get_rt_info()
    names = str(info["originalLayersNames"].astype(str)).split(",") if "originalLayersNames" in info else []
    return [name for name in names if name]


def _name(output: Any) -> str:
    """An output may also have the names of other, equal tensors."""
    own: str = output.node.friendly_name.partition("/sink_port_")[0]
    return own if own in output.names else min(output.names, default=own)


if __name__ == "onnxq.runtime.backend":
    backend = OpenVino(*sys.argv[2:])
    serve(backend)
    backend.compiled_before.cleanup()
    # The client waits for the end of the process, and unloading libraries takes longer than everything else.
    os._exit(0)
