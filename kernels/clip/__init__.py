"""Drawn drafts with a price: what is served in the place of the target."""
