"""`vllm-mars calibrate`: the loosest threshold that keeps a budget of loss."""
