"""Checkpoints that are fetched from the hub."""
