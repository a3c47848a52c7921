"""Puts artifacts where many machines fetch them from."""
