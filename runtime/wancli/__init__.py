"""The command ``wanrun``, and what its options have in common with those of ``wanbuild``."""
