"""From models and shapes to StableHLO and compiled executables."""
