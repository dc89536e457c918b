"""Passes that lead back from codes to floats."""
