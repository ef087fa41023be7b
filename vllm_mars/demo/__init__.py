"""The comparison of three servers, `vllm-mars demo`."""
