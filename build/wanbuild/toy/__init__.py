"""Small random checkpoints in the published layout."""
