"""Spans of time, and what is made of them: a summary, JSON, a trace, a picture."""
