"""The manners of a command: its signals, its lines, what it waits for, its temporary files."""
