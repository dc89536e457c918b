"""Number formats, scales and quantized values: arrays in, arrays out. Nothing here knows a graph."""
