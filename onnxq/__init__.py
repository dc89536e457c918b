"""onnxq: graph-rewriting quantization for ONNX models."""
