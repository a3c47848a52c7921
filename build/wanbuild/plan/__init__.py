"""Predicts the memory and the time that a model takes on a chip, without an artifact or the chip."""
