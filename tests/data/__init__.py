"""Test files of this room may have the names of others'."""
