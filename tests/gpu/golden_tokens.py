"""Tokens of random sampled steps, as Triton's interpreter draws them from seeds.

    TRITON_INTERPRET=1 PYTHONPATH=tests:tests/interpreted python tests/gpu/golden_tokens.py

writes golden_tokens.json again, in a few minutes. The steps themselves follow from their
numbers, so that the file holds tokens alone, and of each step a checksum of what is drawn last for
it: another NumPy that drew other numbers would show there.
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
# One block, and several splits of a row and blocks of a draw.
SMALL, LARGE = 70, 49_152
NUM_STEPS = {SMALL: 80, LARGE: 5}
KINDS = {
    f"{name} {str(dtype).removeprefix('torch.')} {vocab}": (name, dtype, vocab)
    for vocab in NUM_STEPS
    for name in ("theta", "price", "drawn")
    for dtype in (torch.float32, torch.bfloat16)
}


def steps(kind: str, most: int = max(NUM_STEPS.values())) -> Iterator[tuple[Call, tuple, int]]:
    """The first steps of a kind: the call, `sampled_step` of it, and the checksum."""
    name, dtype, vocab = KINDS[kind]

    def calls() -> Iterator[Call]:
        for number in count():
            call = Call(number, "theta" if name == "theta" else "price", True, vocab, dtype)
            # What is there or not is a variant each, which takes a GPU seconds to compile.
            if vocab == LARGE or (
                call.engine_params.protected is not None and call.constraints is not None
            ):
                yield call

    for call in islice(calls(), min(most, NUM_STEPS[vocab])):
        step = sampled_step(call, name == "drawn")
        numbers = call.ids.tolist() + step[-1].sampling.seeds.tolist()
        yield call, step, zlib.crc32(repr(numbers).encode())


def tokens_of(call: Call, step: tuple) -> list[list[int]]:
    """What the kernels emit of a step for each of its requests."""
    given, constraints, sampling_inputs, engine_params = (
        to(DEVICE, value) for value in (*step[1:], call.engine_params)
    )
    output = fused.verify(given, engine_params, constraints, None, sampling_inputs)
    counts = output.num_emitted.tolist()
    rows = output.output_token_ids.tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def written(kind: str) -> list:
    """What the file holds of a kind: of each step the checksum and the tokens of each request."""
    return [[check, tokens_of(call, step)] for call, step, check in steps(kind)]


def write(found: dict[str, list]) -> None:
    """Writes the file, a line for each kind."""
    lines = [f'"{kind}": {json.dumps(own, separators=(",", ":"))}' for kind, own in found.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", (
        "TRITON_INTERPRET=1 must be set: a GPU is held to what is written here"
    )
    write({kind: written(kind) for kind in KINDS})
