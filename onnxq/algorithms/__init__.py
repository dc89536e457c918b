"""Published algorithms that turn statistics and weights into encodings. They edit no graph."""
