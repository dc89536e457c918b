"""Passes that write a plan and its encodings into the graph."""
