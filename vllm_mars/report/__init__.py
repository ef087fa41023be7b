"""Counts and reports, from a worker to Prometheus and to an answer."""
