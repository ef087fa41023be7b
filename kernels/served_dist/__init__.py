"""The law of what is sampled: the distribution that is served in the place of the target."""
