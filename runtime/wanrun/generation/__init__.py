"""One generation: its options, its conditions from images and videos, and the pipeline that makes it."""
