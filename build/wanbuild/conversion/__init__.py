"""Converts a checkpoint's tensors to an artifact's chunk files."""
