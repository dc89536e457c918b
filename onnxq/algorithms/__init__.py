"""Published algorithms from statistics and weights to encodings, before any graph is edited."""
