"""Runs executables that were built without their chip, and compares them with ones compiled on it."""
