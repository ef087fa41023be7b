"""The command `vllm-mars`."""
