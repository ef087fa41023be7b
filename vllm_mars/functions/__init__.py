"""Public verification functions."""
