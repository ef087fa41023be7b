"""What the Triton kernels compile to, for GPUs that need not be there.

`python -m benchmarks.kernel_resources --output benchmarks/results/kernel-resources.json`

Every variant that serving reaches is compiled for sm_80, sm_90, sm_100 and gfx942 with the launch
settings of `vllm_mars.kernels`; registers, spills and shared memory are read from the binary. Of
`top2_kernel` on CUDA the loop over the vocabulary is also counted, in instructions for each logit:
a kernel that is to reach the memory's bandwidth must stay below what the chip can issue meanwhile.
Nothing runs, so nothing here is a speed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_mars.kernels import counting, greedy, repeats, sections, top2, tree
from vllm_mars.kernels.terms import MOST_NODES, CounterStarts
from vllm_mars.local.provenance import describe_run

SCHEMA = "vllm-mars/kernel-resources/1"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# The launch settings and the width of the partial results are those of this vocabulary.
VOCAB = 128_256
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel; `types` are its run-time arguments in Triton's notation."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    aligned: tuple[str, ...] = ("logits_ptr", "best_ptr", "second_ptr", "logits_stride", "vocab")
    logits_dtype: str = "bf16"
    options: dict[str, Any] = field(default_factory=dict)


def variants() -> list[Variant]:
    """Every specialisation that the samplers reach, and those of the public functions."""
    result = []
    for dtype in DTYPES:
        result.append(_top2(f"top2, rows by index, {dtype}", dtype, rows=True))
        result.append(_top2(f"top2, rows in order, {dtype}", dtype, rows=False))
    result.append(_top2("top2, rows by index, bf16, odd stride", "bf16", rows=True, odd=True))
    result.append(_top2("top2, rows by index, bf16, z1 alone", "bf16", rows=True, second=False))
    for per_request in (False, True):
        whose = "theta per request" if per_request else "one theta"
        result.append(_accept(f"accept, bonus rows, {whose}", "rows", per_request))
        result.append(_accept(f"accept, bonus row last, {whose}", "last", per_request))
        result.append(_judge(f"judge, {whose}", per_request))
    result.append(_accept("accept, bonus ids, one theta", "ids", False))
    result.append(_accept("accept, no bonus", "no", False))
    result.append(_accept("accept, bonus rows, 128 drafts", "rows", False, max_draft_len=128))
    # An engine that counts, with all that requests can bring.
    result.append(_with_limits(_accept("accept, bonus rows, all limits", "rows", True)))
    result.append(_with_limits(_accept("accept, bonus row last, all limits", "last", True)))
    result.append(_with_limits(_judge("judge, all limits", True)))
    result.append(_priced(_accept("accept, bonus rows, one price", "rows", False), False))
    result.append(
        _priced(_accept("accept, bonus row last, price per request", "last", False), True)
    )
    limited = _with_limits(_accept("accept, bonus rows, price, all limits", "rows", False))
    result.append(_priced(limited, True))
    result.append(_priced(_judge("judge, price per request", False), True))
    result.append(_walk("walk, 60 nodes, one theta"))
    result.append(_walk("walk, 60 nodes, the drafter's order", prefer="draft"))
    result.append(_walk("walk, 60 nodes, draws", draws=True))
    result.append(_priced(_walk("walk, 60 nodes, price per request"), True))
    result.append(_walk("walk, 128 nodes, one theta", num_nodes=MOST_NODES))
    result.append(_count())
    result.append(_block())
    result.append(_repeat())
    return result


def _top2(name: str, dtype: str, *, rows: bool, odd: bool = False, second: bool = True) -> Variant:
    _, block, warps = top2.launch_settings(VOCAB, 64)
    types = {
        "best_ptr": "*i64",
        "second_ptr": "*fp32",
        "logits_ptr": f"*{dtype}",
        "logits_stride": "i32",
        "bonus_rows_ptr": "*i32",
        "num_draft": "i32",
        "vocab": "i32",
        "blocks_per_split": "i32",
    }
    if rows:
        types["target_rows_ptr"] = "*i32"
    constants = {
        "BLOCK": block,
        "CHUNK": 16 // DTYPES[dtype],
        "HAS_TARGET_ROWS": rows,
        "WITH_SECOND": second,
    }
    aligned = Variant.aligned[:3] if odd else Variant.aligned
    return Variant(name, top2.top2_kernel, types, constants, warps, aligned, dtype)


def _judged(per_request: bool) -> dict[str, str]:
    """Types of the arguments that `accept_kernel` and `judge_kernel` share."""
    threshold = "*fp32" if per_request else "fp32"
    return {
        "best_ptr": "*i64",
        "second_ptr": "*fp32",
        "logits_ptr": "*bf16",
        "logits_stride": "i32",
        "draft_token_ids_ptr": "*i32",
        "protected_ptr": "*i1",
        "cu_num_draft_tokens_ptr": "*i32",
        "theta": threshold,
        "gap": threshold,
        **dict.fromkeys(("price", "share", "rate", "burst"), "i32"),
        "vocab": "i32",
        "num_splits": "i32",
    }


def _shared_constants(per_request: bool, rows: bool) -> dict[str, Any]:
    _, block, _ = top2.launch_settings(VOCAB, 64)
    return {
        "SPLITS": triton.next_power_of_2(triton.cdiv(VOCAB, block)),
        "HAS_TARGET_ROWS": rows,
        "HAS_PROTECTED": True,
        "HAS_BLOCKED": False,
        "HAS_BUDGET": False,
        "HAS_LOSS_BUDGET": False,
        "HAS_PRICE": False,
        "THETA_PER_REQUEST": per_request,
        "GAP_PER_REQUEST": per_request,
        "PRICE_PER_REQUEST": False,
        "RATE_PER_REQUEST": False,
        "WITH_SECOND": True,
    }


def _accept(name: str, bonus: str, per_request: bool, *, max_draft_len: int = 5) -> Variant:
    types = {
        **_judged(per_request),
        "output_token_ids_ptr": "*i64" if bonus == "last" else "*i32",
        "num_accepted_ptr": "*i32",
        "num_relaxed_ptr": "*i32",
        "lost_ptr": "*i64",
        "num_draft": "i32",
        "max_draft_len": "i32",
    }
    if bonus == "ids":
        types["bonus_token_ids_ptr"] = "*i64"
    if bonus != "last":
        types["target_rows_ptr"] = "*i32"
    constants = {
        **_shared_constants(per_request, rows=bonus != "last"),
        "POSITIONS": greedy.num_positions(max_draft_len),
        "BONUS": bonus,
        "WITH_VERDICTS": False,
        "DRY_RUN": False,
    }
    options = {"enable_fp_fusion": False}
    return Variant(name, greedy.accept_kernel, types, constants, options=options)


def _judge(name: str, per_request: bool) -> Variant:
    types = {
        **_judged(per_request),
        "logits_ptr": "*fp32",
        "verdicts_ptr": "*i8",
        "losses_ptr": "*i32",
    }
    constants = {
        **_shared_constants(per_request, rows=False),
        "POSITIONS": greedy.num_positions(0),
        "WITH_VALUES": False,
    }
    options = {"enable_fp_fusion": False}
    return Variant(name, greedy.judge_kernel, types, constants, options=options)


def _walk(
    name: str, *, num_nodes: int = 60, prefer: str = "longest", draws: bool = False
) -> Variant:
    integers = ("num_draft", "max_depth", "num_rounds", "num_leaps")
    types = {
        **_judged(False),
        "output_token_ids_ptr": "*i32",
        "path_ptr": "*i32",
        "num_accepted_ptr": "*i32",
        "num_relaxed_ptr": "*i32",
        "lost_ptr": "*i64",
        "parents_ptr": "*i32",
        "node_rows_ptr": "*i32",
        "root_rows_ptr": "*i32",
        **dict.fromkeys(integers, "i32"),
    }
    if draws:
        types["draws_ptr"] = "*i32"
    constants = {
        **_shared_constants(False, rows=False),
        "SLOTS": greedy.num_positions(num_nodes),
        "PREFER": prefer,
        "HAS_DRAWS": draws,
    }
    options = {"enable_fp_fusion": False}
    return Variant(name, tree.walk_kernel, types, constants, options=options)


def _with_limits(variant: Variant) -> Variant:
    """The same with blocked positions, both budgets, and verdicts for the counters."""
    types = {
        **variant.types,
        "blocked_ptr": "*i8",
        "budget_used_ptr": "*i32",
        "budget_lost_ptr": "*i64",
        "budget_produced_ptr": "*i32",
        "rate": "*i64",
        "top2_values_ptr": "*fp32",
        "verdicts_ptr": "*i8",
        "losses_ptr": "*i32",
    }
    here = ("HAS_BLOCKED", "HAS_BUDGET", "HAS_LOSS_BUDGET", "RATE_PER_REQUEST")
    constants = {**variant.constants, **dict.fromkeys(here, True)}
    wanted = "WITH_VALUES" if "WITH_VALUES" in constants else "WITH_VERDICTS"
    return replace(variant, types=types, constants={**constants, wanted: True})


def _priced(variant: Variant, per_request: bool) -> Variant:
    """The same with a price, which reads z2 only for the counters."""
    types = {**variant.types, "price": "*fp32" if per_request else "i32"}
    counts = variant.constants.get("WITH_VERDICTS") or variant.constants.get("WITH_VALUES")
    constants = {
        **variant.constants,
        **{"HAS_PRICE": True, "PRICE_PER_REQUEST": per_request, "WITH_SECOND": bool(counts)},
    }
    return replace(variant, types=types, constants=constants)


def _count() -> Variant:
    types = {
        "counts_ptr": "*i64",
        "top2_values_ptr": "*fp32",
        "verdicts_ptr": "*i8",
        "losses_ptr": "*i32",
        "num_accepted_ptr": "*i32",
        "draft_token_ids_ptr": "*i32",
        "cu_num_draft_tokens_ptr": "*i32",
        "edges_ptr": "*fp32",
        **{"theta": "fp32", "gap": "fp32", "units": "fp32"},
        **dict.fromkeys((f"{name}_start" for name in CounterStarts._fields), "i32"),
        "num_edges": "i32",
    }
    constants = {
        **{"EDGES": 16, "POSITIONS": 8, "DRY_RUN": False},
        **{"THETA_PER_REQUEST": False, "GAP_PER_REQUEST": False},
    }
    options = {"enable_fp_fusion": False}
    return Variant("count", counting.count_kernel, types, constants, warps=1, options=options)


def _block() -> Variant:
    names = sections.block_kernel.arg_names
    types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in names}
    types["blocked_ptr"] = "*i8"
    del types["ONLY_THINKING"]
    return Variant("block", sections.block_kernel, types, {"ONLY_THINKING": True}, warps=1)


def _repeat() -> Variant:
    names = repeats.repeat_kernel.arg_names
    types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in names if name.islower()}
    types["blocked_ptr"] = "*i8"
    constants = {
        **{"BONUS_ROW_IS_LAST": True, "LENGTH": 4},
        **{"DRAFTS": repeats.DRAFTS, "BLOCK": repeats.BLOCK},
    }
    return Variant("repeat", repeats.repeat_kernel, types, constants)


def compile_variant(variant: Variant, target: GPUTarget) -> Any:
    """The compiled kernel of a variant; Triton's `CompiledKernel`."""
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    divisible = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in variant.aligned
        if name in variant.types
    }
    constants = {
        name: variant.constants.get(name) for name in names if signature[name] == "constexpr"
    }
    source = ASTSource(variant.kernel, signature, constants, divisible)
    options = {"num_warps": variant.warps, **variant.options}
    return triton.compile(source, target=target, options=options)


def resources(variant: Variant, compiled: Any) -> dict[str, int | float]:
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
    if variant.kernel is top2.top2_kernel:
        logits = variant.constants["BLOCK"] / (32 * variant.warps)
        found["loop_instructions_per_logit"] = round(len(loop_body(code)) / logits, 2)
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
    for variant in variants():
        for name, target in TARGETS.items():
            found = resources(variant, compile_variant(variant, target))
            rows.append({"variant": variant.name, "target": name, **found})
            print(rows[-1])
    if args.output:
        result = {
            "schema": SCHEMA,
            **describe_run(None),
            "triton": triton.__version__,
            "vocab": VOCAB,
            "kernels": rows,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
