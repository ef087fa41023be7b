"""Verification in Triton and on CPUs, installed as `vllm_mars.kernels`.

Arguments are not checked here but in `vllm_mars.functions`.
"""
