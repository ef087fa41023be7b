"""Placeholder."""


def warm_up_v1(verification, logits, longest):
    """Nothing on a CPU."""
