"""Benchmarks of running servers: sweeps, their result files and their tables."""
