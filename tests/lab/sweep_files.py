"""Files of sweeps whose figures are known by hand, and prompt files."""

import dataclasses
import json

from vllm_mars.lab.plan import Cell
from vllm_mars.lab.records import Answer, Measured, Piece, Record, RunHeader, append_line

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
STANDARD = Cell("standard", NGRAM, 0.0, 1)
RUN = {"git_commit": "0123456789abcdef", "command": ["vllm-mars", "sweep"]}
SETTINGS = {"model": "tiny", "prompts": 4, "max_tokens": 21}
PIECES = (Piece("The"), Piece(" red", 0.5), Piece(" fox <b>\n"), Piece("|", 0.25), Piece(" end"))


def mars(price, temperature=0.0):
    config = {**NGRAM, "rejection_sample_method": "mars", "mars_price": price}
    return Cell(f"price {price:g}", config, temperature, 1)


def turn(
    cell, block=0, repeat=0, *, token_seconds=0.02, lost=None, accepted=10, pieces=(), drift=0.0
):
    """Two answers of 21 tokens, the first token after 0.1 s; 10 steps."""
    # Prompts differ in the same way for all rules.
    times = [0.1 + 20 * token_seconds * (1 + 0.1 * number + 0.2 * block) for number in range(2)]
    text = "".join(piece.text for piece in pieces) or "text"
    answers = tuple(
        Answer(f"p{2 * block + number}", text, 21, 0.1, seconds, pieces)
        for number, seconds in enumerate(times)
    )
    measured = Measured(sum(times), 10, accepted, lost, answers, drift)
    return Record(*cell, repeat=repeat, block=block, measured=measured)


def joined(records, stall=0.0):
    """One turn with the answers of all records, the first of which takes `stall` seconds longer."""
    first, *others = (answer for record in records for answer in record.measured.answers)
    answers = (dataclasses.replace(first, seconds=first.seconds + stall), *others)
    total = stall + sum(record.measured.seconds for record in records)
    measured = dataclasses.replace(records[0].measured, seconds=total, answers=answers)
    return dataclasses.replace(records[0], measured=measured)


def failed(cell, reason):
    return dataclasses.replace(turn(cell), measured=None, reason=reason)


def write_prompts(path, prompts):
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return str(path)


def write_sweep(path, records, baseline="standard"):
    append_line(path, dataclasses.asdict(RunHeader(SETTINGS, baseline, RUN)))
    for record in records:
        append_line(path, dataclasses.asdict(record))
    return path
