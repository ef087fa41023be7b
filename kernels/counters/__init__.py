"""Counters of an engine and report rows of a step."""
