"""Small random checkpoints in the published layout, and the published configs that they start from."""
