"""Downloads checkpoints from the Hugging Face hub."""
