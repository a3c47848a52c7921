"""Publishes artifacts to places from which many machines fetch them."""
