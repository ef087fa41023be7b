"""Constraints that the text puts on draft positions: strict spans, openings, n-grams."""
