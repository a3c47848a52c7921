"""Reads LoRA files in every common layout, and adds them to weights during conversion."""
