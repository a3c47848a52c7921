"""Chooses few steps for a model by its own converged runs, and measures what they lose."""
