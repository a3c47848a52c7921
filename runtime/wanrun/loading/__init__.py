"""Loads weights and executables from files to a device, and decides where they are kept."""
