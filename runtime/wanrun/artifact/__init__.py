"""An artifact's manifest, the layout of its files, and the choice of the profile and target for a machine."""
