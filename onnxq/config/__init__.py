"""What the user asks for: schemes, their rules and presets, and the files that hold them."""
