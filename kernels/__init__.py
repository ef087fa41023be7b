"""Verification in Triton and on CPUs, as `vllm_mars.kernels`; arguments are not checked here."""
