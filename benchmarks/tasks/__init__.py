"""Prompts of tasks that a single wrong token spoils."""
