"""What an artifact holds, and whether it computes what it should."""
