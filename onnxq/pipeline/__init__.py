"""What users call: quantize and its steps, optimize, dequantize, inspect, and folders of models."""
