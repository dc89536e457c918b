"""Passes that put codes into the graph, as a plan says."""
