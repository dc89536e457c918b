"""Plan quantization: choose the mode of every node, with the reason in words; the graph is not edited."""
