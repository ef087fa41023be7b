"""Statistics of each row of logits that the rules need."""
