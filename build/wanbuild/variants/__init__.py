"""The variants of Wan: a module for each kind, with its rows, its conditions and what else is its own."""
