"""What an artifact says of itself: its manifest, the layout of its files, and what of it fits a machine."""
