"""Execution: parts of a model run over samples, in this process, in others or on a cluster."""
