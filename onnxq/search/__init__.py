"""Search: plans in, the fastest accurate plan out, by what was measured on this machine. Edits no graph."""
