"""Numbers: formats, scales and codes. Arrays in, arrays out; knows no graph."""
