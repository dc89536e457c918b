"""Graph-rewriting passes, one a file."""
