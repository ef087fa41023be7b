"""The tokens that keep their probability."""
