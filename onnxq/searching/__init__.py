"""Searching: plans in, the fastest faithful plan out, by what was measured on this machine. Edits no graph."""
