"""From files to a device: weights, executables, and where they are kept."""
