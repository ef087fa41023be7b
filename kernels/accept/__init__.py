"""Which draft tokens of a request stay."""
