"""Files of sweeps with figures known by hand."""

import dataclasses

from vllm_mars.lab.plan import Cell
from vllm_mars.lab.records import Answer, Measured, Piece, Record, RunHeader, append

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
STANDARD = Cell("standard", NGRAM, 0.0, 1)
RUN = {
    **{"created": "2026-01-01T00:00:00+00:00", "git_commit": "0123456789abcdef"},
    **{"command": ["vllm-mars", "sweep", "--prompts", "my prompts.jsonl"], "load_average": 0.1},
    **{"versions": {"vllm": "0.32.0"}, "hardware": {"cpu": "x", "cores": 2, "gpu": None}},
}
SETTINGS = {"model": "tiny", "prompts": 4, "max_tokens": 21}
PIECES = (Piece("The"), Piece(" red", 0.5), Piece(" fox <b>\n"), Piece("|", 0.25), Piece(" end"))


def mars(price, temperature=0.0, concurrency=1):
    """A cell with a price."""
    config = {**NGRAM, "rejection_sample_method": "mars", "mars_price": price}
    return Cell(f"price {price:g}", config, temperature, concurrency)


def turn(
    cell,
    block=0,
    repeat=0,
    *,
    token_seconds=0.02,
    lost=None,
    accepted=10,
    pieces=(),
    drift=0.0,
):
    """Two answers of 21 tokens, the first token after 0.1 s; 10 steps."""
    # Prompts differ, alike for all rules.
    times = [0.1 + 20 * token_seconds * (1 + 0.1 * place + 0.2 * block) for place in range(2)]
    answers = tuple(
        Answer(
            *(f"p{2 * block + place}", "".join(it.text for it in pieces) or "text", 21, 0.1),
            *(seconds, pieces),
        )
        for place, seconds in enumerate(times)
    )
    measured = Measured(sum(times), 10, accepted, lost, answers, drift)
    return Record(*cell, repeat=repeat, block=block, measured=measured)


def stalled(record, seconds):
    """The same turn while the machine stood still during its first answer."""
    first, *others = record.measured.answers
    answers = (dataclasses.replace(first, seconds=first.seconds + seconds), *others)
    total = record.measured.seconds + seconds
    measured = dataclasses.replace(record.measured, seconds=total, answers=answers)
    return dataclasses.replace(record, measured=measured)


def joined(records):
    """One turn of the answers of all."""
    answers = tuple(answer for record in records for answer in record.measured.answers)
    total = sum(record.measured.seconds for record in records)
    measured = dataclasses.replace(records[0].measured, seconds=total, answers=answers)
    return dataclasses.replace(records[0], measured=measured)


def failed(cell, reason):
    """A turn that failed."""
    return dataclasses.replace(turn(cell), measured=None, reason=reason)


def write_sweep(path, records, baseline="standard"):
    """Writes a file and returns its path."""
    append(path, RunHeader(SETTINGS, baseline, RUN))
    for record in records:
        append(path, record)
    return path
