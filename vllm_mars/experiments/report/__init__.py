"""`vllm-mars report`: one page of sweeps and calibrations."""
