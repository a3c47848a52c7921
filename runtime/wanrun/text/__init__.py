"""From prompts to their embeddings."""
