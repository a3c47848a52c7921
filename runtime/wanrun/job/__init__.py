"""A job: a resolved request with the files to write of it, what is done for it now, and how it ended."""
