"""The Triton kernels, run by the interpreter, against the torch reference: exact on every token id.

Run by `tests/kernels/test_kernel_interpreted.py`, with TRITON_INTERPRET=1 set before triton loads.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

import fuzz
from vllm_mars import verify_greedy
from vllm_mars.kernels import greedy, reference, top2
from vllm_mars.kernels.terms import (
    Drafts,
    LossBudget,
    Margin,
    RelaxedBudget,
    Verdict,
    loss_rate,
    new_output,
)
from vllm_mars.verify import judge_drafts, verify_drafts

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_the_kernels_are_interpreted():
    for kernel in (top2.top2_kernel, greedy.accept_kernel):
        assert isinstance(kernel, InterpretedFunction)


def check(logits, drafts, lengths, theta, **given):
    """Both entries on the Triton backend, with and without poisoned buffers, against reference."""
    cu = torch.tensor(lengths).cumsum(0).int()
    given = dict(given)
    dry_run = given.pop("dry_run", False)
    rows = {"bonus_token_ids": None, "target_rows": None, "bonus_rows": None}
    rows = {name: given.pop(name, default) for name, default in rows.items()}
    verify = functools.partial(
        verify_greedy,
        *(logits, drafts, cu, rows["bonus_token_ids"], theta),
        target_rows=rows["target_rows"],
        bonus_rows=rows["bonus_rows"],
        max_draft_len=max(lengths),
        dry_run=dry_run,
        backend="triton",
        **given,
    )
    step = Drafts(logits, drafts, cu, max_draft_len=max(lengths), **rows), Margin(theta, **given)
    expected = reference.verify_greedy(*step, with_verdicts=True, dry_run=dry_run)
    output = verify()
    for name in ("output_token_ids", "num_accepted", "num_relaxed", "lost"):
        assert torch.equal(getattr(output, name), getattr(expected, name))
    assert output.top2_values is None and output.verdicts is None
    judged = verify(with_verdicts=True)
    assert torch.equal(judged.verdicts, expected.verdicts)
    torch.testing.assert_close(judged.top2_values, expected.top2_values, equal_nan=True)
    out = new_output(step[0], with_verdicts=True)
    for buffer in out:
        buffer.fill_(-7)
    verify(with_verdicts=True, out=out)
    for buffer, result in zip(out, expected, strict=True):
        torch.testing.assert_close(buffer, result, rtol=0, atol=0, equal_nan=True)
    unasked = [buffer.fill_(-7) for buffer in (out.top2_values, out.verdicts, out.losses)]
    verify(out=out)
    assert all(bool((buffer == -7).all()) for buffer in unasked)
    judged = judge_drafts(*step, with_top2_values=True, backend="triton")
    wanted = reference.judge_positions(*step, with_top2_values=True)
    assert torch.equal(judged.verdicts, wanted.verdicts)
    assert torch.equal(judged.losses, wanted.losses)
    torch.testing.assert_close(judged.top2_values, wanted.top2_values, equal_nan=True)
    return output


@st.composite
def batches(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    vocab = draw(st.sampled_from([1, 2, 5, 33, 111]))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    size, rows = sum(lengths), sum(lengths) + len(lengths)

    def random(*shape):
        return torch.rand(*shape, generator=generator)

    logits = torch.randn(rows, vocab, generator=generator) * 2 + 2
    if draw(st.booleans()):
        logits = logits.round()  # ties
    for value in draw(st.lists(st.sampled_from([-math.inf, math.nan, math.inf, -0.0]), max_size=2)):
        logits[random(rows, vocab) < 0.2] = value
    logits = logits.to(draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        # A row stride that is neither the vocabulary nor aligned.
        wide = torch.full((rows, vocab + 3), math.nan, dtype=logits.dtype)
        wide[:, :vocab] = logits
        logits = wide[:, :vocab]
    target_rows = torch.randperm(rows, generator=generator)[:size] if draw(st.booleans()) else None
    chosen = logits[:size] if target_rows is None else logits[target_rows]
    rank = (random(size, 1) * min(3, vocab)).long()
    drafts = chosen.float().topk(min(3, vocab)).indices.gather(1, rank).squeeze(1)
    drafts[random(size) < 0.1] = -1
    drafts[random(size) < 0.05] = vocab + 7
    given = {"gap": draw(st.sampled_from([0.0, 0.3, random(len(lengths))]))}
    bonus = draw(st.sampled_from(["none", "ids", "rows"]))
    if bonus == "ids":
        given["bonus_token_ids"] = (random(len(lengths), 1) * vocab).long()
    if bonus == "rows":
        given["bonus_rows"] = torch.randperm(rows, generator=generator)[: len(lengths)]
    if draw(st.booleans()):
        given["protected"] = random(vocab) < 0.2
    if draw(st.booleans()):
        kinds = torch.tensor([0, 0, Verdict.SPAN, Verdict.STRUCTURED])
        given["blocked"] = kinds[(random(size) * len(kinds)).long()].to(torch.int8)
    if draw(st.booleans()):
        produced = (random(len(lengths)) * 50).int()
        used = (produced * random(len(lengths)) * 0.4).int()
        share = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
        given["budget"] = RelaxedBudget(share, used, produced)
    if draw(st.booleans()):
        rate = draw(st.sampled_from([0.0, 0.05, random(len(lengths)) * 0.2]))
        given["loss_budget"] = LossBudget(
            loss_rate(rate) if isinstance(rate, float) else (rate * 2**30).long(),
            1 << 15,
            (random(len(lengths)) * 2**16).long(),
            # Both budgets know of one output.
            (random(len(lengths)) * 50).int() if "budget" not in given else produced,
        )
    given["dry_run"] = draw(st.booleans())
    if draw(st.booleans()):
        given["gap"] = 0.0
        given["price"] = draw(st.sampled_from([0.05, 1.0, random(len(lengths)) * 2]))
        return (
            logits,
            drafts.to(draw(st.sampled_from([torch.int32, torch.int64]))),
            lengths,
            1.0,
            {
                **given,
                "target_rows": target_rows,
            },
        )
    theta = draw(st.sampled_from([1.0, 0.9, 0.5, 0.01, random(len(lengths)).clamp(min=0.01)]))
    given["target_rows"] = target_rows
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return logits, drafts.to(dtype), lengths, theta, given


def for_batches(by_day, at_night):
    """Calls a test with so many drawn batches."""

    def decorate(test):
        @pytest.mark.parametrize(
            "count", [by_day, pytest.param(at_night, marks=pytest.mark.nightly)]
        )
        def with_batches(count):
            settings(max_examples=count, deadline=None)(given(batches())(test))()

        return with_batches

    return decorate


@for_batches(12, 150)
def test_equals_reference(batch):
    logits, drafts, lengths, theta, given = batch
    check(logits, drafts, lengths, theta, **given)


@for_batches(8, 60)
def test_input_token_layout_equals_the_other(batch):
    logits, drafts, lengths, theta, given = batch
    # One row more for each request: its bonus row.
    rows = sum(lengths) + len(lengths)
    ends = (torch.tensor(lengths) + 1).cumsum(0).int()
    inputs = torch.full((rows,), 3, dtype=drafts.dtype)
    is_bonus = torch.zeros(rows, dtype=torch.bool)
    is_bonus[ends.long() - 1] = True
    # A draft token is the input of the row after its own.
    inputs[(~is_bonus).nonzero().squeeze(1) + 1] = drafts
    longest = max(lengths)
    limits = {name: given.get(name) for name in ("gap", "protected", "budget")}
    if "blocked" in given:
        limits["blocked"] = torch.zeros(rows, dtype=torch.int8)
        limits["blocked"][~is_bonus] = given["blocked"]
    step = Drafts(logits, inputs, ends, max_draft_len=longest, bonus_row_is_last=True)
    options = {"with_verdicts": True, "dry_run": given.get("dry_run")}
    output, expected = (
        verify_drafts(step, Margin(theta, **limits), backend=backend, **options)
        for backend in ("triton", "torch")
    )
    for name in ("output_token_ids", "num_accepted", "num_relaxed", "lost"):
        assert torch.equal(getattr(output, name), getattr(expected, name))
    assert torch.equal(output.verdicts, expected.verdicts)
    assert output.output_token_ids.dtype == torch.int64


# Each dtype once. The larger sizes differ in the number of splits alone, and take 15 to 30 s.
BY_DAY = {(32_000, torch.float32), (32_000, torch.float16), (49_152, torch.bfloat16)}


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        pytest.param(*case, marks=[] if case in BY_DAY else pytest.mark.nightly)
        for case in itertools.product([32_000, 49_152, 128_256, 151_936], DTYPES)
    ],
)
def test_large_vocabulary(vocab, dtype):
    """Several splits and a last one that is not full; the maximum near the end of each row."""
    torch.manual_seed(vocab)
    logits = (torch.randn(5, vocab) + 1).to(dtype)
    logits[:, -1] = 20.0
    logits[:, vocab // 2] = 19.5
    drafts = torch.tensor([vocab - 1, vocab // 2, 3, vocab // 2], dtype=torch.int32)
    output = check(logits, drafts, [3, 1], 0.9, bonus_rows=torch.tensor([4, 4], dtype=torch.int32))
    assert output.num_relaxed.tolist() == [1, 1]


def test_many_positions_of_one_request():
    torch.manual_seed(0)
    logits = torch.randn(128, 33) + 2
    drafts = logits.argmax(-1).int()
    output = check(logits, drafts, [0, 128, 0], 0.9)
    assert output.num_accepted.tolist() == [0, 128, 0]


def test_random_calls():
    for number in range(8):
        assert fuzz.check_triton(np.random.default_rng([7, number])) is None


def test_nothing_to_verify():
    check(torch.zeros(2, 5), torch.zeros(0, dtype=torch.int32), [0, 0], 0.9)


def test_rows_past_2_to_the_31_elements():
    """The second row starts past 2**31 elements; only the pages that are touched take memory."""
    stride = 2**31 + 64
    storage = torch.empty(stride + 128, dtype=torch.bfloat16)
    logits = storage.as_strided((2, 100), (stride, 1))
    logits[:] = torch.linspace(1, 8, 100).to(torch.bfloat16)
    logits[:, 99] = 9.0
    logits[:, 40] = 8.9
    output = check(logits, torch.tensor([99, 40], dtype=torch.int32), [2], 0.9)
    assert output.output_token_ids.tolist() == [[99, 40, -1]]
