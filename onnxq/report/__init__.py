"""The report of a quantization: its value, JSON, pages, charts and refusals."""

from onnxq.report.refusal import AccuracyError, check_accuracy, check_bound, check_gain, check_size, check_speed
from onnxq.report.report import Report, load_report

__all__ = [
    "AccuracyError",
    "Report",
    "check_accuracy",
    "check_bound",
    "check_gain",
    "check_size",
    "check_speed",
    "load_report",
]
