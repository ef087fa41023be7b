"""Counting on a real GPU: the same as on a CPU, and nothing waits for the device."""

import pytest
import torch

from test_counters import LONGEST, random_case, step
from vllm_mars.runner.counters import CounterLayout, Counters, count_positions

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

DEVICE = torch.device("cuda")


def test_counts_without_a_sync():
    layout = CounterLayout(LONGEST)
    on_cpu, on_gpu = Counters(layout, torch.device("cpu")), Counters(layout, DEVICE, interval=0.0)
    generator = torch.Generator().manual_seed(5)
    cases = [random_case(generator, 16) for _ in range(20)]
    moved = [step(case, DEVICE) for case in cases]
    count_positions(on_gpu, *moved[0])
    count_positions(on_cpu, *step(cases[0]))
    taken = torch.tensor(on_gpu.take_delta(flush=True))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for arguments in moved[1:]:
            count_positions(on_gpu, *arguments)
            if (increase := on_gpu.take_delta()) is not None:
                taken += torch.tensor(increase)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for case in cases[1:]:
        count_positions(on_cpu, *step(case))
    taken += torch.tensor(on_gpu.take_delta(flush=True))
    assert taken.tolist() == on_gpu.device_counts.tolist()
    assert on_gpu.device_counts.tolist() == on_cpu.device_counts.tolist()
