"""The model layer: GraphSurgeon classes, read and written without loss."""
