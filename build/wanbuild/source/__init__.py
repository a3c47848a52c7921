"""A published checkpoint: its files, configs and tensors, checked before anything is written."""
