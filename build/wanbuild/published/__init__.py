"""The configs of the published checkpoints, field for field."""
