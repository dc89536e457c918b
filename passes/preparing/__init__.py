"""Prepare a float model: passes in order, and checks that they keep its outputs."""
