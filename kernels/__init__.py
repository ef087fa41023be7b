"""Verification kernels and their form for a CPU, installed as `vllm_mars.kernels`.

The public wrappers are in `vllm_mars.functions.verify`; nothing here checks its input.
"""
