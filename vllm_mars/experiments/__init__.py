"""The laboratory: speed against quality on a model and draft of your own."""
