"""Read samples from files, images and other sources as dictionaries of arrays that fit the model."""
