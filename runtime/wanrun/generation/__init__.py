"""One generation: its options, what it is conditioned on, and the pipeline that makes it."""
