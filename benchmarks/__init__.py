"""Measurements; each command writes one JSON file with versions and hardware."""
