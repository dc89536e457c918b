"""Commands beside `quantize`: optimize, dequantize, inspect and web folders."""
