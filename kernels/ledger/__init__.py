"""What a request may lose, in units in which every backend agrees."""
