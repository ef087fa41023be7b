"""The tokens of the draft so far, which penalties count."""
