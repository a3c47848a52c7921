"""The variants of Wan: one module per kind, with its table rows, its conditions and its other specifics."""
