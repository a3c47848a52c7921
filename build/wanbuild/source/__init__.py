"""Published checkpoints: files, configs and tensors, checked before anything is written."""
