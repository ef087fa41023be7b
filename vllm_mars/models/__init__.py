"""The packaged model, its draft head, and speculative configs."""
