"""The command line: one module a group of commands, and the terminal that draws what they say."""
