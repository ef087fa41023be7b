"""Rejection samplers in vLLM's workers, and their inputs."""
