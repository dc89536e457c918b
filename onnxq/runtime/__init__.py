"""Runtimes that execute models: onnxruntime here, other engines, other processes, other machines."""
