"""Trains the tiny checkpoints with torch, on diffusers' and transformers' own classes."""
