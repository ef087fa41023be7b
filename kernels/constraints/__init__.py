"""Where in an answer verification is strict, and what it may repeat."""
