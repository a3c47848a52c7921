"""Builds programs from models and shapes: exports them as StableHLO and compiles them."""
