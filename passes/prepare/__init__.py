"""Passes from float to float."""
