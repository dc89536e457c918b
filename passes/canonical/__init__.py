"""Rules that bring every export of a network to one form; all of them are applied together."""
