"""Checks, lists, makes and writes the videos of a command line or a prompts file."""
