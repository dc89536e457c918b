"""Evaluation: how far a model is from the float model, what that says of other samples, and its latency."""
