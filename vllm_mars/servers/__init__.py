"""Servers on this machine, and where a result came from."""
