"""Warm-up meets every variant of the kernels that a sampler's steps reach, so none compiles later.

Run by `tests/kernels/test_kernel_interpreted.py`, with TRITON_INTERPRET=1 set before triton loads.
"""

import itertools

import pytest
import torch

from vllm_mars import MarsConfig
from vllm_mars.kernels import counting, greedy, repeats, sections, top2
from vllm_mars.kernels.terms import Drafts, LossBudget, Margin, Slots, loss_units
from vllm_mars.runner.counters import CounterLayout, Counters
from vllm_mars.runner.margin import MarginRule
from vllm_mars.runner.sections import Sections
from vllm_mars.runner.warmup import warm_up_v1, warm_up_v2

SPECIALIZED = {"logits_stride", "vocab", "logits_ptr", "best_ptr", "second_ptr", "counts_ptr"}
LONGEST = 9
CONFIGS = [
    MarsConfig(theta=0.9),
    MarsConfig(theta=0.9, structured="relaxed"),
    MarsConfig(theta=0.9, strict_spans=((3, 4),), shadow=(0.8, 0.9)),
    MarsConfig(theta=0.9, structured="relaxed", repeat_guard=4),
]


class Recorder:
    """Stands before a kernel and notes what Triton's cache would look a launch up by."""

    def __init__(self, kernel, seen):
        self.kernel = kernel
        self.seen = seen

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.seen.add(self.key(args, kwargs))
            return self.kernel[grid](*args, **kwargs)

        return launch

    def key(self, args, kwargs):
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        key = [self.kernel.fn.__name__]
        for name, value in sorted(given.items()):
            if isinstance(value, torch.Tensor):
                key.append((name, value.dtype))
                if name in SPECIALIZED:
                    key.append(value.data_ptr() % 16 == 0)
            elif name.isupper() or name not in self.kernel.arg_names:
                key.append((name, value))
            elif name in SPECIALIZED:
                key.append((name, value == 1, value % 16 == 0))
            else:
                key.append((name, type(value)))
        return tuple(key)


@pytest.fixture
def seen(monkeypatch):
    keys = set()
    for module, name in (
        (top2, "top2_kernel"),
        (greedy, "accept_kernel"),
        (counting, "count_kernel"),
        (sections, "block_kernel"),
        (repeats, "repeat_kernel"),
    ):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), keys))
    return keys


def steps(vocab, stride, dtype):
    """Ragged batches of up to 5 drafts, as vLLM's steps bring them."""
    torch.manual_seed(0)
    for lengths in ([0, 3], [9, 7]):
        rows = sum(lengths) + len(lengths)
        logits = torch.randn(rows, stride).to(dtype)[:, :vocab]
        yield lengths, logits


@pytest.fixture(
    params=[
        pytest.param(((512, 512), CONFIGS[0]), id="default", marks=pytest.mark.nightly),
        # Those of the guard, with fewer margins, meet a vocabulary that is no multiple of 16 too.
        pytest.param(((521, 528), CONFIGS[0]), id="odd vocabulary", marks=pytest.mark.nightly),
        pytest.param(((512, 768), CONFIGS[1]), id="budget", marks=pytest.mark.nightly),
        pytest.param(((512, 512), CONFIGS[2]), id="shadow"),
        pytest.param(((521, 528), CONFIGS[3]), id="guard"),
    ],
)
def served(request):
    """(vocabulary, stride) of a model, and the rule of an engine that counts."""
    shape, config = request.param
    rule = MarginRule(config, [2], backend="triton")
    rule.counters = Counters(CounterLayout(LONGEST, config.shadow), torch.device("cpu"))
    return shape, rule


def all_margins(config, batch, num_draft):
    """What the requests of a step can bring."""
    blocked = torch.zeros(num_draft, dtype=torch.int8)
    positions = [blocked] if config.strict_spans or config.repeat_ngram else [None, blocked]
    if positions[0] is None and config.structured == "relaxed":
        positions = [None]
    long, int32 = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int32)
    bound = LossBudget(long, loss_units(config.loss_burst), long, int32)
    loss_budgets = [None] if config.shadow else [None, bound]
    for theta, *limits in itertools.product(
        (0.9, torch.full((batch,), 0.9)), positions, loss_budgets
    ):
        blocked, loss_budget = limits
        yield Margin(theta, blocked=blocked, loss_budget=loss_budget)


def judge(rule, drafts, margin):
    """The path of a batch in which some sample: judging, verifying and counting."""
    is_greedy = torch.arange(len(drafts.cu_num_draft_tokens)) % 2 == 0
    with rule.relaxed_made_certain(drafts, margin, is_greedy) as judgement:
        pass
    accepted = torch.zeros(len(drafts.cu_num_draft_tokens), dtype=torch.int32)
    rule.record(drafts, margin, judgement, accepted, {})


def block(rule, drafts, ends, *, bonus_row_is_last):
    """The kernels that requests launch before each step that can have strict positions."""
    blocked = torch.zeros(len(drafts), dtype=torch.int8)
    given = Drafts(torch.empty(0, 0), drafts, ends, bonus_row_is_last=bonus_row_is_last)
    prompt_len, total_len = torch.zeros(2, 5, dtype=torch.int32)
    # V2's `idx_mapping` is int64.
    places = torch.arange(len(ends), dtype=torch.int64 if bonus_row_is_last else torch.int32) % 5
    slots = Slots(places, torch.zeros((5, 33), dtype=torch.int32), prompt_len, total_len)
    if rule.config.repeat_ngram:
        repeats.block_repeats(blocked, slots, given, rule.config.repeat_ngram)
    if rule.config.strict_spans or rule.config.structured == "strict" or rule.config.repeat_ngram:
        states, scanned, structured = torch.zeros(3, 5, dtype=torch.int32)
        markers = Sections(rule.config).markers(torch.device("cpu"))
        sections.blocked_rows(states, scanned, structured, slots, given, markers)


def test_v1(seen, served):
    (vocab, stride), rule = served
    # The dummy run's logits are contiguous, whatever the model's are.
    warm_up_v1(rule, torch.zeros(3, vocab, dtype=torch.bfloat16), LONGEST)
    warm = set(seen)
    for lengths, logits in steps(vocab, stride, torch.bfloat16):
        drafts = torch.zeros(sum(lengths), dtype=torch.int32)
        cu = torch.tensor(lengths).cumsum(0).int()
        batch = len(lengths)
        # What a processor has touched is float32, in order, and its bonus tokens are sampled.
        processed = logits.float().contiguous()[: len(drafts)]
        bonus = torch.zeros(batch, 1, dtype=torch.int32)
        block(rule, drafts, cu, bonus_row_is_last=False)
        longest = max(lengths)
        raw_step = Drafts(
            logits,
            drafts,
            cu,
            target_rows=torch.arange(len(drafts), dtype=torch.int32),
            bonus_rows=torch.arange(batch, dtype=torch.int32),
            max_draft_len=longest,
        )
        step = Drafts(processed, drafts, cu, bonus_token_ids=bonus, max_draft_len=longest)
        for margin in all_margins(rule.config, batch, len(drafts)):
            rule.verify(raw_step, margin)
            rule.verify(step, margin)
            judge(rule, step, margin)
    assert seen == warm


def test_v2(seen, served):
    (vocab, stride), rule = served
    warm_up_v2(rule, torch.zeros(3, vocab, dtype=torch.bfloat16), LONGEST)
    warm = set(seen)
    for lengths, logits in steps(vocab, stride, torch.bfloat16):
        inputs = torch.zeros(len(logits), dtype=torch.int32)
        # The runner's prefix sum starts with a 0 that is cut off: a view that is not aligned.
        ends = torch.tensor([0, *itertools.accumulate(length + 1 for length in lengths)]).int()[1:]
        block(rule, inputs, ends, bonus_row_is_last=True)
        step = Drafts(logits, inputs, ends, max_draft_len=LONGEST)
        for margin in all_margins(rule.config, len(lengths), len(logits)):
            rule.verify(step._replace(bonus_row_is_last=True), margin)
            for processed in (logits, logits.float().contiguous()):
                judge(rule, step._replace(logits=processed, max_draft_len=LONGEST + 1), margin)
    assert seen == warm


def test_nothing_is_compiled_for_the_torch_backend(seen):
    rule = MarginRule(MarsConfig(theta=0.9), [])
    warm_up_v1(rule, torch.zeros(2, 512), 5)
    warm_up_v2(rule, torch.zeros(2, 512), 5)
    assert not seen
