"""Build toolchain: turns published Wan checkpoints into artifacts that ``wanrun`` executes."""
