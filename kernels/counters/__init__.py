"""Where a step writes down what it did."""
