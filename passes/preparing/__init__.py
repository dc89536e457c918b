"""The float model made ready: passes in order, and the check that they keep what it computes."""
