"""Verification of a step in plain Python: what is done for its requests, in which order.

It serves a CPU, and is the definition of what `kernels.fused` does.
"""

import numpy as np
import torch

from vllm_mars.kernels.accept import naive as accept
from vllm_mars.kernels.account.naive import Account, CounterLayout, write_down
from vllm_mars.kernels.rows.naive import num_gainful, read_rows
from vllm_mars.kernels.step import Step, Terms, VerifyOutput
from vllm_mars.kernels.strictness.naive import Guarded


def verify(
    step: Step,
    terms: Terms,
    guard: Guarded | None = None,
    account: Account | None = None,
    chance: accept.Chance | None = None,
    bonus: torch.Tensor | None = None,
) -> VerifyOutput:
    """Verifies a step; what its requests lose is added to their records.

    Args:
        step: its logits are processed but for the temperature.
        terms: of the engine.
        guard: what the text before each row asks; or None, where it asks nothing.
        account: where the step is written down.
        chance: what decides where requests sample; None if all are greedy.
        bonus: what follows the draft of each request if all of it is accepted, `[batch]` or
            `[batch, 1]`; None, where all are greedy, for the first choice of the row behind it.
    """
    step = step._replace(logits=step.logits.detach().float())
    slots, width = step.slots.tolist(), step.num_speculative_tokens
    temperature = [0.0] * len(slots) if chance is None else chance.temperature.tolist()
    rows = read_rows(step, terms, guard, temperature, with_bonus=bonus is None)
    behind = None if bonus is None else bonus.reshape(-1).tolist()
    relaxes, layout = step.records.relaxes, CounterLayout(width)
    tokens = np.full((len(slots), width + 1), -1, dtype=np.int32)
    summary = np.zeros((3, len(slots)), dtype=np.int64)
    begins = [0, *step.cu_num_logits.tolist()]
    for place, allowed in enumerate(accept.allowances(step)):
        begin, end = begins[place], begins[place + 1] - 1
        emitted = accept.accept(rows, allowed, step, terms, place, chance, guard)
        accepted, token = emitted.accepted, emitted.token
        if token is None:
            token = rows.argmax[end] if behind is None else behind[place]
        tokens[place, : accepted + 1] = [*rows.draft[begin : begin + accepted], token]
        # What lies behind the answer's end is no part of it.
        most = 0 if allowed.has_ended else num_gainful(rows, begin, end, allowed) + 1
        counted = emitted._replace(positions=emitted.positions[:most], gained=emitted.gained[:most])
        own = rows.draft[begin:end], not temperature[place], bool(relaxes[slots[place]])
        num_relaxed, lost = write_down(counted, *own, place, account, layout)
        if lost:
            step.records.lost[slots[place]] += lost
        summary[:, place] = accepted + 1, num_relaxed, lost
    emitted_, relaxed_, lost_ = torch.from_numpy(summary)
    return VerifyOutput(torch.from_numpy(tokens), emitted_.int(), relaxed_.int(), lost_)
