"""Targets: the kinds of machine that programs are compiled for, as data, and how their devices are opened."""
