"""Experts from logits to a rank's partials, with weights in any layout that the kernels read."""
