"""Run models on onnxruntime in this process, on other engines, in other processes and on other machines."""
