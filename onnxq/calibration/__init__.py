"""Calibration: collect and merge statistics of tensors over samples, and find calibration ranges from them."""
