"""Calibration: samples in, statistics out, ranges from statistics."""
