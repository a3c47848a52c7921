"""Many machines make the videos of one prompts file."""
