"""What evidence says, as plain values for people and JSON."""

from __future__ import annotations

from typing import Any

from onnxq.calibration.evidence import Evidence, TensorEvidence
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.ranges import Percentile, bins_of_data
from onnxq.calibration.sentinels import sentinels
from onnxq.calibration.value_range import Range

_PERCENT = 99.99


def described(evidence: Evidence) -> dict[str, Any]:
    """Return what evidence says, as plain values for people and JSON."""
    return {
        "model": evidence.provenance.model,
        "samples": len(evidence.samples),
        "runtime": evidence.provenance.runtime,
        "machines": list(evidence.provenance.machines),
        "tensors": {tensor: _described(evidence.of(tensor)) for tensor in evidence.by_tensor},
    }


def _described(seen: TensorEvidence) -> dict[str, Any]:
    found = seen.find(Range) or Range()
    notes = [statistic.note for _, statistic in sorted(seen.statistics.items(), key=lambda one: one[0])]
    counted = found.count and seen.find(Histogram) is not None
    return {
        "elements": found.count,
        "minimum": found.minimum if found.count else None,
        "maximum": found.maximum if found.count else None,
        "percentile": list(Percentile(_PERCENT).within(bins_of_data(seen))) if counted else [None, None],
        "note": "; ".join(note for note in (_range_note(seen.find(Range)), *notes) if note),
    }


def _range_note(found: Range | None) -> str:
    if found is None:
        return ""
    if not found.count:
        return "empty"
    if masks := sentinels(found):
        return "masked with " + ", ".join(f"{value:g}" for value in masks)
    if found.minimum == found.maximum:
        return "all zero" if found.minimum == 0 else "constant"
    return ""
