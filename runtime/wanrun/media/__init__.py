"""Images and videos: read, brought to a size, and written."""
