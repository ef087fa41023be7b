"""Measurements of speed against quality: what `vllm-mars sweep` runs, and the file it writes."""
