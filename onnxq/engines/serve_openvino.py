"""OpenVINO on the CPU, as the process that serves it knows it: numpy and openvino alone."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from onnxq.engines.serving import Array, Loaded, serve

# Such as "Check 'false' failed at src/frontends/onnx/frontend/src/core/graph.cpp:151:".
_SOURCE_PLACE = re.compile(r"(?:Exception from|Check '[^']*' failed at) \S+:\d+:")


class OpenVino:
    """OpenVINO's CPU device, one request at a time."""

    def __init__(self, precision: str = "") -> None:
        """Take what to compute in; left to OpenVINO it is bfloat16 where the processor multiplies that."""
        import openvino

        self.core, self.precision = openvino.Core(), precision
        self.version = f"openvino {openvino.__version__.split('-')[0]}" + (f" in {precision}" if precision else "")

    def load(self, model: str, threads: int | None) -> Loaded:
        """Load a model file."""
        return _Session(self._compiled(model, threads))

    def profile(
        self, model: str, samples: Sequence[Mapping[str, Array]], repeats: int
    ) -> tuple[Mapping[str, Any], Sequence[Array]]:
        """Return the kernels that ran, with the names of all nodes that were fused into each as its outputs."""
        compiled = self._compiled(model, None, PERF_COUNT=True)
        originals = {
            node.friendly_name: str(node.get_rt_info()["originalLayersNames"].astype(str)).split(",")
            for node in compiled.get_runtime_model().get_ops()
            if "originalLayersNames" in node.get_rt_info()
        }
        request = compiled.create_infer_request()
        request.infer(dict(samples[0]))
        times: dict[str, list[float]] = {}
        kinds: dict[str, str] = {}
        for sample in samples:
            runs: dict[str, list[float]] = {}
            for _ in range(repeats):
                request.infer(dict(sample))
                for found in request.profiling_info:
                    if found.status.name == "EXECUTED":
                        runs.setdefault(found.node_name, []).append(found.real_time.total_seconds() * 1e9)
                        kinds[found.node_name] = found.node_type
            for name, one in runs.items():
                times.setdefault(name, []).append(statistics.median(one))
        kernels = [
            {
                "name": name,
                "op_type": kinds[name],
                "inputs": [],
                "outputs": originals.get(name, [name]),
                "nanoseconds": sum(found) / len(samples),
                "elements": 0.0,
            }
            for name, found in times.items()
        ]
        return {"kernels": kernels}, ()

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
            found = self.request.infer(dict(sample))
        except RuntimeError as error:
            raise RuntimeError(_SOURCE_PLACE.sub("", str(error))) from None
        return [found[number].copy() for number in range(len(self.outputs))]


def _name(output: Any) -> str:
    """Return the name of an output, which may have those of other tensors that are equal too."""
    own: str = output.node.friendly_name.partition("/sink_port_")[0]
    return own if own in output.names else min(output.names, default=own)


if __name__ == "onnxq.engines.backend":
    serve(OpenVino(*sys.argv[2:]))
