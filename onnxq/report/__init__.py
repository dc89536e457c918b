"""What is told of a quantization: the value, as JSON, and when it is a refusal."""

from onnxq.report.refusal import FidelityError, check_fidelity, check_gain, check_speed
from onnxq.report.report import Report, load_report

__all__ = ["FidelityError", "Report", "check_fidelity", "check_gain", "check_speed", "load_report"]
