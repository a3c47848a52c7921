"""Several processes, on one host or many, that run one artifact together."""
