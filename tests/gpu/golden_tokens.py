"""Golden tokens: random sampled steps with the tokens that Triton's interpreter samples.

    TRITON_INTERPRET=1 PYTHONPATH=tests:tests/interpreted python tests/gpu/golden_tokens.py

writes golden_tokens.json in a few minutes. Each step follows from its number, so the file holds
only its tokens and a checksum of its last random numbers, which would reveal a change in NumPy's.
"""

import json
import os
import zlib
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch

from calls import CPU, Call, sampled_step, to
from vllm_mars.kernels import fused

GOLDEN = Path(__file__).with_suffix(".json")
# Without a GPU tests run in the interpreter.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
DEVICE = CPU if IS_INTERPRETED else torch.device("cuda")
# One block; several splits of a row and several resampling blocks.
SMALL, LARGE = 70, 49_152
NUM_STEPS = {SMALL: 80, LARGE: 5}
KINDS = {
    f"{name} {str(dtype).removeprefix('torch.')} {vocab}": (name, dtype, vocab)
    for vocab in NUM_STEPS
    for name in ("theta", "price", "probabilistic")
    for dtype in (torch.float32, torch.bfloat16)
}


def steps(kind: str, most: int = max(NUM_STEPS.values())) -> Iterator[tuple[Call, tuple, int]]:
    """The first steps of a kind: the call, its `sampled_step`, and the checksum."""
    name, dtype, vocab = KINDS[kind]

    def calls() -> Iterator[Call]:
        for number in count():
            call = Call(number, "theta" if name == "theta" else "price", True, vocab, dtype)
            # Each combination of inputs is a variant, which takes seconds to compile on a GPU.
            if vocab == LARGE or (
                call.engine_params.protected is not None and call.constraints is not None
            ):
                yield call

    for call in islice(calls(), min(most, NUM_STEPS[vocab])):
        step = sampled_step(call, name == "probabilistic")
        numbers = call.ids.tolist() + step[-1].sampling.seeds.tolist()
        yield call, step, zlib.crc32(repr(numbers).encode())


def tokens_of(call: Call, step: tuple) -> list[list[int]]:
    """Tokens that the kernels emit for each request of a step."""
    inputs, constraints, sampling_inputs, engine_params = (
        to(DEVICE, value) for value in (*step[1:], call.engine_params)
    )
    output = fused.verify(inputs, engine_params, constraints, None, sampling_inputs)
    counts = output.num_emitted.tolist()
    rows = output.output_token_ids.tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def written(kind: str) -> list:
    """The file's entry of a kind: checksum and tokens of each step."""
    return [[check, tokens_of(call, step)] for call, step, check in steps(kind)]


def write(steps_of: dict[str, list]) -> None:
    lines = [
        f'"{kind}": {json.dumps(entries, separators=(",", ":"))}'
        for kind, entries in steps_of.items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", (
        "TRITON_INTERPRET=1 must be set: a GPU must reproduce the interpreter's tokens"
    )
    write({kind: written(kind) for kind in KINDS})
