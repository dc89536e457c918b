"""Evidence: what samples have shown of tensors, how it merges and is kept, and the ranges that it means."""
