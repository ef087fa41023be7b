"""The served distribution, which takes the place of the target's in sampled requests."""
