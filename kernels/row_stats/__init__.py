"""What the rules need to know of each row of logits."""
