"""One generation as it is asked for, and as it is resolved against an artifact."""
