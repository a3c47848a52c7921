"""Turns published LoRA files into adapters: files of an artifact's layout, which a video may choose."""
