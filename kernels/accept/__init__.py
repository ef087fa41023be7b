"""Acceptance of draft tokens and resampling of the next token."""
