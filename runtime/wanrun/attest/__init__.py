"""Runs executables that were built without their chip beside what is compiled on it of the same StableHLO."""
