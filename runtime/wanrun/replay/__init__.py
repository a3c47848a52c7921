"""Makes an artifact's recorded videos again, and compares."""
