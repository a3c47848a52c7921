"""Restores weights, and puts them on devices."""
