"""Turns prompts into embeddings."""
