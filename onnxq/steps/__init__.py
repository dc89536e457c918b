"""The steps of a run, in the order in which `onnxq.pipeline` takes them."""
