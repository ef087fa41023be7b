"""What the target accepts of a head's greedy chains, strictly, without vLLM.

A draft counts only where all drafts before it in its step are the target's own tokens, so one pass
of the head over the target's tokens (`Eagle3Head.steps`) gives all guesses that matter.
"""

import torch

from benchmarks.draft.data import Sequence
from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.target import Target
from benchmarks.draft.train import make_batch


@torch.inference_mode()
def accepted_drafts(target: Target, head: Eagle3Head, answer: Sequence, count: int) -> list[int]:
    """Returns how many of `count` drafts each step of a greedy answer accepts."""
    batch = make_batch([answer.tokens], [answer.states], [answer.prompt_tokens], count)
    embeddings = target.embedding[batch.tokens[:, 1:]]
    right = []
    for step, hidden in enumerate(head.steps(batch.states, embeddings, batch.anchors, count)):
        guesses = head.draft_tokens[head.lm_head(hidden[0]).argmax(-1)]
        true = batch.tokens[0, batch.anchors[0] + 2 + step]
        right.append((guesses == true) & (batch.valid[0] > step))
    accepted = torch.stack(right).int().cumprod(0).sum(0).tolist()
    found, place = [], 0
    # The prefill gives the first token; a step emits its accepted drafts and one token more.
    while place < len(answer.tokens) - 1 - answer.prompt_tokens:
        found.append(accepted[place])
        place += accepted[place] + 1
    return found
