"""The report of a quantization: its value, JSON, pages, charts and refusals."""

from onnxq.report.refusal import AccuracyError, check
from onnxq.report.report import Report, load_report

__all__ = ["AccuracyError", "Report", "check", "load_report"]
