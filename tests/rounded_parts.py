"""A model of codes beside its float parts, whose tensors and weights are rounded as its codes are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from onnxq.algorithms.bias_correction import rounded_by
from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.segments import stages
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.inputs import Sample
from onnxq.planning.plan import Plan
from onnxq.runtime.sessions import Array, open_session, run
from onnxq.search.prepared_model import PreparedModel


def both_outputs(
    bench: PreparedModel,
    plan: Plan,
    evidence: CalibrationStatistics,
    recipe: EncodingConfig,
    samples: Sequence[Sample],
    folder: Path,
) -> Iterator[tuple[Array, Array]]:
    """Yield what the model that is built gives as its output ``y``, and what the parts give, for each sample."""
    rounded = rounded_by(encode(plan, bench.graph, evidence, recipe), plan, bench.graph)
    parts = stages(bench.prepared, rounded.activations.keys(), free=rounded.weights.keys())
    bench.build(plan, evidence, recipe, folder / "q.onnx", external_data=False)
    session = open_session(folder / "q.onnx", optimize=False)
    for sample in samples:
        values = rounded.of(sample)
        for part in parts:
            values |= rounded.of(part.run(values, rounded.weights_of(part)))
        yield run(session, sample)[0], values["y"]
