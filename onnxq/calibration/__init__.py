"""Calibration: statistics of tensors over samples, how they are collected and merged, and the ranges they give."""
