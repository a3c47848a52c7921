"""What a model will need and how long it will take on a chip, before there is an artifact or the chip."""
