"""Verification kernels and their torch reference, installed as `vllm_mars.kernels`.

The public wrappers are in `vllm_mars.verify`; nothing here checks its input.
"""
