"""What the Triton kernels compile to, for GPUs that need not be there.

`python -m benchmarks.kernel_resources --output benchmarks/results/kernel-resources.json`

Every variant that serving reaches is compiled for sm_80, sm_90, sm_100 and gfx942 as
`vllm_mars.kernels` launches it; registers, spills and shared memory are read from the binary. Of
`top2_kernel` on CUDA the loop over the vocabulary is also counted, in instructions for each logit:
a kernel that is to reach the memory's bandwidth must stay below what the chip can issue meanwhile.
Nothing runs, so nothing here is a speed.
"""

import argparse
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from vllm_mars.kernels import counting, greedy, repeats, sections, top2, tree, tree_reference
from vllm_mars.kernels.terms import (
    Drafts,
    Judgement,
    LossBudget,
    Margin,
    Markers,
    RelaxedBudget,
    Slots,
)
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json
from vllm_mars.runner.counters import RATIO_EDGES, RATIO_UNIT, CounterLayout

SCHEMA = "vllm-mars/kernel-resources/1"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# The launch settings and the width of the partial results are those of this vocabulary.
VOCAB = 128_256
# Its rows start at addresses that 16 bytes do not divide.
ODD_STRIDE = VOCAB + 1
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_ids = functools.partial(torch.zeros, dtype=torch.int32)
# A request with two draft tokens, and the row of its bonus token.
_IDS, _ONE = _ids(2), _ids(1)
_SLOTS = Slots(_ONE, _ids(1, 1), _ONE, _ONE)


def _drafts(dtype: str = "bf16", stride: int = VOCAB, **layout: Any) -> Drafts:
    logits = torch.empty((3, stride), dtype=DTYPES[dtype])[:, :VOCAB]
    return Drafts(logits, _IDS, _ONE, **{"max_draft_len": 5, **layout})


def _margin(per_request: bool = False, **limits: Any) -> Margin:
    """One theta, or one for each request; some tokens are protected."""
    theta, gap = (torch.ones(1), torch.ones(1)) if per_request else (0.9, 0.0)
    return Margin(theta, gap, protected=torch.zeros(VOCAB, dtype=torch.bool), **limits)


def variants() -> dict[str, Callable[[], Any]]:
    """Calls of the launchers by variant: all that the samplers and the public functions reach.

    A name begins with that of the kernel, but "judge" is `accept_kernel` for verdicts alone; what
    else a call launches is another variant.
    """
    by_index: dict[str, Any] = {"target_rows": _IDS, "bonus_rows": _ONE}
    last: dict[str, Any] = {"bonus_row_is_last": True}
    limits: dict[str, Any] = {
        "blocked": torch.zeros(2, dtype=torch.int8),
        "budget": RelaxedBudget(0.5, _ONE, _ONE),
        "loss_budget": LossBudget(_ONE.long(), 0, _ONE.long(), _ONE),
    }
    one_theta, own_price = _margin(), _margin(price=torch.ones(1))
    # An engine that counts, with all that requests can bring.
    all_limits = _margin(True, **limits)
    tops = {f"rows by index, {dtype}": (_drafts(dtype, **by_index), True) for dtype in DTYPES}
    tops |= {f"rows in order, {dtype}": (_drafts(dtype, bonus_rows=_ONE), True) for dtype in DTYPES}
    tops["rows by index, bf16, odd stride"] = _drafts(stride=ODD_STRIDE, **by_index), True
    tops["rows by index, bf16, z1 alone"] = _drafts(**by_index), False
    accepts: dict[str, tuple[Any, ...]] = {
        "bonus rows, one theta": (_drafts(**by_index), one_theta),
        "bonus rows, theta per request": (_drafts(**by_index), _margin(True)),
        "bonus row last, one theta": (_drafts(**last), one_theta),
        "bonus row last, theta per request": (_drafts(**last), _margin(True)),
        "bonus ids, one theta": (_drafts(target_rows=_IDS, bonus_token_ids=_ONE.long()), one_theta),
        "no bonus": (_drafts(target_rows=_IDS), one_theta),
        "bonus rows, 128 drafts": (_drafts(max_draft_len=128, **by_index), one_theta),
        "bonus rows, all limits": (_drafts(**by_index), all_limits, True),
        "bonus row last, all limits": (_drafts(**last), all_limits, True),
        "bonus rows, one price": (_drafts(**by_index), _margin(price=0.5)),
        "bonus row last, price per request": (_drafts(**last), own_price),
        "bonus rows, price, all limits": (_drafts(**by_index), own_price._replace(**limits), True),
    }
    judges: dict[str, tuple[Any, ...]] = {
        "one theta": (_drafts("fp32"), one_theta),
        "theta per request": (_drafts("fp32"), _margin(True)),
        "all limits": (_drafts("fp32"), all_limits, True),
        "price per request": (_drafts("fp32"), own_price),
    }
    walks = {
        "60 nodes, theta": (_trees(60),),
        "60 nodes, the drafter's order": (_trees(60, prefer="draft"),),
        "60 nodes, price": (_trees(60, rule="price"),),
        "128 nodes, theta": (_trees(128),),
    }
    launches: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "top2": (top2.reduce_rows, tops),
        "accept": (greedy.verify_greedy, accepts),
        "judge": (greedy.judge_positions, judges),
        "walk": (tree.verify_tree, walks),
    }
    found = {
        f"{kernel}, {name}": functools.partial(launch, *arguments)
        for kernel, (launch, calls) in launches.items()
        for name, arguments in calls.items()
    }
    return {**found, "count": _count, "block": _block, "repeat": _repeat}


def _trees(num_nodes: int, **options: Any) -> tree_reference.Trees:
    nodes, drafts = _ids(num_nodes), _drafts()
    protected = torch.zeros(VOCAB, dtype=torch.bool)
    given = {"rule": "theta", "prefer": "longest", **options}
    rows = drafts.logits, nodes, _ONE, nodes, _ONE, nodes
    one = torch.ones(1)
    return tree_reference.Trees(
        *rows, value=one, price=one.long(), protected=protected, max_depth=7, **given
    )


def _count() -> None:
    layout = CounterLayout(num_speculative_tokens=5)
    judgement = Judgement(_IDS.to(torch.int8), torch.empty(2, 2), _IDS)
    counting.count_positions(
        _drafts(),
        judgement,
        _ONE,
        _margin(),
        dry_run=False,
        counts=torch.zeros(layout.size, dtype=torch.int64),
        starts=layout.starts,
        ratio_edges=torch.tensor(RATIO_EDGES),
        ratio_unit=RATIO_UNIT,
    )


def _block() -> None:
    markers = Markers(_IDS, _IDS, (3, 4), only_thinking=True)
    sections.blocked_rows(_ONE, _ONE, _ONE, _SLOTS, _drafts(), markers)


def _repeat() -> None:
    repeats.block_repeats(_IDS.to(torch.int8), _SLOTS, _drafts(bonus_row_is_last=True), 4)


def compile_variant(name: str, target: str) -> Any:
    """The compiled kernel of one of `variants`; Triton's `CompiledKernel`."""
    kernel = name.split(",")[0].replace("judge", "accept")
    return compile_launch(variants()[name], f"{kernel}_kernel", target)


def compile_launch(launch: Callable[[], Any], kernel_name: str, target: str) -> Any:
    """The kernel of this name as a call on the CPU launches it, compiled for a target instead.

    Other kernels that the call launches are passed over.
    """
    compiled: list[Any] = []

    def instead_of_launching(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def compile_it(*args: Any, **kwargs: Any) -> None:
            if kernel.fn.__name__ == kernel_name:
                compiled.append(kernel.warmup(*args, grid=grid, **kwargs))

        return compile_it

    # Triton asks its driver what to compile for, and keeps what it compiled by device.
    driver = SimpleNamespace(
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGETS[target],
    )
    with (
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(JITFunction, "__getitem__", instead_of_launching),
    ):
        launch()
    (kernel,) = compiled
    return kernel


def resources(compiled: Any) -> dict[str, int | float]:
    """Registers of a thread, bytes it spills, bytes of shared memory, and counts of the loop."""
    if "amdgcn" in compiled.asm:
        code = compiled.asm["amdgcn"]
        return {
            "registers": _number(r"\.vgpr_count:\s*(\d+)", code),
            "spills": _number(r"\.vgpr_spill_count:\s*(\d+)", code),
            "shared_bytes": compiled.metadata.shared,
            "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", code)),
        }
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        code = _tool("nvdisasm", "-c", str(cubin))
    found: dict[str, int | float] = {
        "registers": _number(r"REG:(\d+)", usage),
        "spills": _number(r"LOCAL:(\d+)", usage),
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"LDG\.E(?:\.\w+)*\.128", code)),
    }
    if compiled.metadata.name == "top2_kernel":
        _, block, warps = top2.launch_settings(VOCAB, 1)
        found["loop_instructions_per_logit"] = round(
            len(loop_body(code)) / (block / (32 * warps)), 2
        )
    return found


def loop_body(code: str) -> list[str]:
    """Instructions of the loop that reads the logits, from a disassembly."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif re.search(r"/\*[0-9a-f]{4,}\*/.*;", line):
            instructions.append(line)
            back = re.search(r"BRA.* `\((\.L_\w+)\)", line)
            if back and back[1] in labels:
                body = instructions[labels[back[1]] :]
                if any("LDG" in instruction for instruction in body):
                    return body
    raise RuntimeError("The disassembly has no loop that loads; has the kernel changed?")


def _tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run(
        [str(tool), *arguments], capture_output=True, text=True, check=True
    ).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"The compiler's report has nothing that matches {pattern!r}.")
    return int(match[1])


def main() -> int:
    """Compiles all variants and prints or writes the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    args = parser.parse_args()
    rows = []
    for name in variants():
        for target in TARGETS:
            found = resources(compile_variant(name, target))
            rows.append({"variant": name, "target": target, **found})
            print(rows[-1])
    if args.output:
        head = {"schema": SCHEMA, **describe_run(None), "triton": triton.__version__}
        write_json(args.output, {**head, "vocab": VOCAB, "kernels": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
