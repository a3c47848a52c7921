"""Many machines make the videos of one file of prompts."""
