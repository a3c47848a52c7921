"""LoRAs: reading their files in every common layout, and adding them to weights while these are converted."""
