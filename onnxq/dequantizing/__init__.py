"""Dequantizing: how a model that computes with codes becomes the float model that it stands for."""
