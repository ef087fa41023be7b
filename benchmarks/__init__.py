"""Benchmarks; each command writes a JSON file with versions and hardware."""
