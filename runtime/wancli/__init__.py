"""The command ``wanrun``, and what its options share with those of ``wanbuild``."""
