"""Inspects an artifact, checks its files, and compares its results with records and with the reference."""
