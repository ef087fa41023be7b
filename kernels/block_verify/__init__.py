"""Block verification of probabilistic drafts."""
