"""`vllm-mars sweep`: speed over a grid of cells, and the file it writes."""
