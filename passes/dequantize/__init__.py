"""Passes that turn quantized models back to float."""
