"""What runs onnx's own C++ on a model without its weights: conversion to other opsets, inlining, inference."""

from __future__ import annotations

from onnxq.onnx_api.functions import check_functions
from onnxq.onnx_api.opset import inline_functions, upgrade_opset
from onnxq.onnx_api.shapes import infer_shapes
from onnxq.onnx_api.skeleton import skeleton

__all__ = ["check_functions", "infer_shapes", "inline_functions", "skeleton", "upgrade_opset"]
