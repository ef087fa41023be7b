"""`vllm-mars demo`: a preset of a sweep, and what is printed of it."""
