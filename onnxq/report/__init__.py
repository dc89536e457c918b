"""The report of a quantization: its value, JSON, pages, charts and refusals."""

from onnxq.report.refusal import FidelityError, check_fidelity, check_gain, check_speed
from onnxq.report.report import Report, load_report

__all__ = ["FidelityError", "Report", "check_fidelity", "check_gain", "check_speed", "load_report"]
