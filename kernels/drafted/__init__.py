"""Counts of the tokens drafted so far, for penalties."""
