"""Flax NNX definitions of the Wan components: the single record of parameter shapes, dtypes and axes."""
