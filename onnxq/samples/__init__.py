"""Samples: what people hand us, as dictionaries of arrays that fit the model."""
