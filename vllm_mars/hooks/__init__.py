"""Import hooks that add MARS to vLLM."""
