"""Verification as plain functions."""
