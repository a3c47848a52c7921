"""Runs executables that were built without their chip, and compares them with local ones of the same StableHLO."""
