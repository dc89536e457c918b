"""Kinds of samples that people have, each a source of its own around the library that reads it."""
