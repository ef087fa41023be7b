"""Random steps of Model Runner V2.

For processes whose Triton is the interpreter (see `tests/interpreted`).
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Importing vLLM's CPU worker replaces pinned memory and streams, before the V2 modules bind them.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip
from vllm import SamplingParams

from benchmarks.step_v2 import Request, Step
from vllm_mars.report.counters import Counters
from vllm_mars.worker.requests_v2 import RequestsV2

CPU = torch.device("cpu")
LENGTHS = [3, 0, 5, 1, 2]


def params(temperature=0.0, seed=None, bad_words=None, **options):
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=50, **options)
    sampling._bad_words_token_ids = bad_words
    return sampling


def each(temperatures, **options):
    """The same parameters at several temperatures, each with another seed."""
    return [params(t, seed, **options) for seed, t in enumerate(temperatures, 1)]


GREEDY = [0.0] * 5
SAMPLED = [0.7, 1.0, 1.3, 0.2, 1.0]
MIXED = [0.0, 1.0, 0.8, 0.0, 1.2]


def random_step(
    seed, samplings, lengths, *, vocab=97, with_draft_logits=False, ranks=(0, 0, 0, 1, 2)
):
    """Random logits and drafts; nine of ten draft tokens have a target rank from `ranks`."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths) + len(lengths)
    logits = torch.randn(rows, vocab, generator=generator) * 3 + 2
    steps = max(lengths)
    requests, row = [], 0
    for sampling, length in zip(samplings, lengths, strict=True):
        best = logits[row : row + length].topk(max(ranks) + 1, dim=-1).indices
        rank = torch.tensor(ranks)[torch.randint(len(ranks), (length, 1), generator=generator)]
        drafts = best.gather(1, rank).squeeze(1)
        elsewhere = torch.rand(length, generator=generator) > 0.9
        drafts[elsewhere] = torch.randint(0, vocab, (int(elsewhere.sum()),), generator=generator)
        requests.append(Request(sampling, drafts.tolist()))
        row += length + 1
    draft_logits = None
    if with_draft_logits:
        draft_logits = torch.randn(len(lengths), steps, vocab, generator=generator) * 2
        for index, request in enumerate(requests):
            # The draft model finds its tokens likely.
            draft_logits[index, torch.arange(len(request.drafts)), request.drafts] += 8
    return Step(requests, logits, draft_logits, steps)


def emitted(output) -> list[list[int]]:
    """Tokens of each request; vLLM leaves the padding undefined."""
    return [
        row[:count].tolist()
        for row, count in zip(output.sampled_token_ids, output.num_sampled.tolist(), strict=True)
    ]


def lost_by_ended(requests: RequestsV2, preempted, finished) -> tuple[int, int]:
    """Number of requests that end, and the units that they lost."""
    counters = Counters(1, CPU)
    requests.leave(preempted, finished, counters)
    counts, layout = counters.device_counts, counters.layout
    return int(counts[layout.ended].sum()), int(counts[layout.ended_lost].sum())


class Allocated(TorchDispatchMode):
    """Records the tensors that are created inside."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.tensors += [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result
