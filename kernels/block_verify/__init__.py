"""Which tokens of a drawn draft stay: verification by blocks."""
