"""`vllm-mars report`: one page of sweeps."""
