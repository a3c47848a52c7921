"""Small random checkpoints in the published layout, and the published configs that they derive from."""
