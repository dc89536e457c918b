"""What a quantization did, as values and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from onnxq.accuracy.refining import Gain
from onnxq.errors import OutputError
from onnxq.graph import Applied
from onnxq.json_values import plain
from onnxq.judging.agreement import Agreement
from onnxq.judging.gate import Judged, Scores
from onnxq.judging.verify import Kernels, Latency
from onnxq.planning.delivery import Delivery
from onnxq.planning.plan import Plan
from onnxq.searching.regions import Region
from onnxq.searching.search import NodeNoise, Point


@dataclass(frozen=True)
class Report:
    """Everything that was decided and measured.

    Attributes:
        model: where the float model came from.
        output: the file that was written, or None.
        float_bytes: size of the float model with its external data.
        bytes: size of the quantized model with its external data.
        plan: every node's decision with its reason.
        ranges: the range method that turned statistics into scales.
        agreement: with the float model, on samples of the calibration data.
        kernels: what runs in the optimised graph.
        latency: beside the float model; None when it was not asked for.
        sensitivities: the nodes that were measured alone, worst first.
        measured: how many candidate models were built and run.
        samples: how many samples were calibrated.
        seconds: time that everything took.
        range_methods: the method of each tensor, where one was chosen for each.
        frontier: the plans that were weighed, by expected time; empty when latency was not measured.
        regions: the integer regions beside the same nodes in float; empty likewise.
        scores: what the user's metric says of both models, where there is one.
        loads: whether onnxruntime loads the written model; if not, everything was measured on the same codes in types
            that it can load.
        corrected_biases: how many nodes have a bias that makes up for the mean error of their rounded weight.
        gains: what each accuracy method that was tried did to the whole model.
        passes: what the passes before the plan changed and left, the user's own first.
        doubts: why the samples may not be representative, in sentences.
        judged: by which samples the agreement and the scores are.
        delivered: how many weights have the bits that the scheme asks for; empty where a plan was carried out.
        left_by_standard: how many nodes stay float because standard ONNX has no integers for them, and operators of the
            runtime's own were not to be written, or not measured.
        metadata_bytes: how much of the quantized model is what the exporter wrote about nodes, tensors and graphs.
    """

    model: str
    output: str | None
    float_bytes: int
    bytes: int
    plan: Plan
    ranges: str
    agreement: Agreement
    kernels: Kernels
    latency: Latency | None
    sensitivities: tuple[NodeNoise, ...]
    measured: int
    samples: int
    seconds: float
    range_methods: Mapping[str, str] = field(default_factory=dict)
    frontier: tuple[Point, ...] = ()
    regions: tuple[Region, ...] = ()
    scores: Scores | None = None
    loads: bool = True
    corrected_biases: int = 0
    gains: tuple[Gain, ...] = ()
    passes: tuple[Applied, ...] = ()
    doubts: tuple[str, ...] = ()
    judged: Judged | None = None
    delivered: tuple[Delivery, ...] = ()
    left_by_standard: int = 0
    metadata_bytes: int = 0

    @property
    def size_ratio(self) -> float:
        """Size of the quantized model as a share of the float model's."""
        return self.bytes / self.float_bytes

    def to_json(self) -> str:
        """Return the report as JSON, figures of the closing table first.

        An infinite SQNR is ``null``, beside a largest error of 0 when equal.
        """
        summary = {
            "size_ratio": self.size_ratio,
            "worst_sqnr": self.agreement.worst_sqnr,
            "speed": self.latency.speed if self.latency is not None else None,
        }
        # A pass may hold anything, and its lists be long.
        passes = [one.to_dict() for one in self.passes]
        fields = asdict(replace(self, passes=()))
        return json.dumps(plain({**summary, **fields, "passes": passes}), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON.

        Raises:
            OutputError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as reason:
            raise OutputError(f"report {path} cannot be written: {reason.strerror}") from reason
