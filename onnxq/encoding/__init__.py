"""Encoding: evidence and weights to everything that will be written, before any graph is edited."""
