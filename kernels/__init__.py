"""Verification kernels and their form for a CPU, installed as `vllm_mars.kernels`.

The public functions are in `vllm_mars.functions`; nothing here checks its input.
"""
