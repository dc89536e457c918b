"""Differential fuzzing of rewriting: random float graphs, what onnxq makes of them, and onnxruntime as the judge."""
