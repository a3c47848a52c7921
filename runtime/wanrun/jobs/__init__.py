"""What a command line or a prompts file asks for: checked, planned, made and written."""
