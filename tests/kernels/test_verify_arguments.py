"""Every wrong argument of the public functions is named, with the rule."""

import pytest
import torch

from vllm_mars import verify_greedy
from vllm_mars.kernels.terms import Drafts, LossBudget, Margin, VerifyOutput
from vllm_mars.verify import verify_drafts


def arguments(**changes):
    given = {
        "logits": torch.zeros(3, 5),
        "draft_token_ids": torch.tensor([1, 2, 3]),
        "cu_num_draft_tokens": torch.tensor([1, 3], dtype=torch.int32),
        "bonus_token_ids": torch.tensor([0, 0]),
        "theta": 0.9,
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(3, 5, dtype=torch.float64)}, "logits has dtype torch.float64"),
        ({"logits": torch.zeros(5)}, "logits has 1 dimensions"),
        ({"logits": torch.zeros(5, 3).T}, r"logits has strides \[1, 3\]"),
        (
            {"draft_token_ids": torch.zeros(6, dtype=torch.int32)[::2]},
            r"draft_token_ids has strides \[2\], but must be contiguous",
        ),
        ({"logits": torch.zeros(2, 5)}, "logits has 2 rows for 3 draft tokens"),
        ({"draft_token_ids": torch.zeros(3)}, "draft_token_ids has dtype torch.float32"),
        ({"draft_token_ids": torch.zeros(3, 1, dtype=torch.int32)}, "must have one dimension"),
        (
            {"cu_num_draft_tokens": torch.tensor([1, 3])},
            "cu_num_draft_tokens has dtype torch.int64",
        ),
        ({"bonus_token_ids": torch.tensor([0])}, r"bonus_token_ids has shape \[1\]"),
        ({"bonus_rows": torch.tensor([0, 1])}, "bonus_token_ids and bonus_rows are both given"),
        ({"theta": 0.0}, r"theta=0.0 is outside \(0, 1\]"),
        ({"theta": 1.5}, r"theta=1.5 is outside \(0, 1\]"),
        ({"theta": float("nan")}, "theta=nan is outside"),
        ({"theta": torch.ones(3)}, r"theta has shape \[3\], but must have shape \[2\]"),
        ({"theta": torch.ones(2).double()}, "theta has dtype torch.float64"),
        ({"gap": -1.0}, r"gap=-1.0 is outside \[0, inf\)"),
        ({"gap": float("inf")}, "gap=inf is outside"),
        ({"protected": torch.zeros(4, dtype=torch.bool)}, r"protected has shape \[4\]"),
        ({"protected": torch.zeros(5)}, "protected has dtype torch.float32"),
        ({"target_rows": torch.tensor([0, 1])}, r"target_rows has shape \[2\]"),
        ({"backend": "cuda"}, "backend='cuda' is not one of"),
        ({"logits": torch.zeros(3, 5, device="meta")}, "is on cpu, but logits are on meta"),
    ],
)
def test_wrong_argument_is_named(changes, message):
    given = arguments(**changes)
    positional = [given.pop(name) for name in arguments()]
    with pytest.raises(ValueError, match=message):
        verify_greedy(*positional, **given)


def test_triton_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        NotImplementedError, match="backend='triton' needs logits on an accelerator"
    ):
        verify_greedy(**arguments(), backend="triton")


def lost(dtype=torch.int64, rate=0):
    tokens = torch.zeros(2, dtype=torch.int32)
    return LossBudget(rate, 0, torch.zeros(2, dtype=dtype), tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"price": 0.5},
            r"price=0.5 is given beside theta=0.9 and gap=0.0; give theta=1 and gap=0",
        ),
        ({"theta": 1.0, "price": -1.0}, r"price=-1.0 is outside \[0, inf\); 0 switches"),
        (
            {"theta": 1.0, "price": torch.ones(3)},
            r"price has shape \[3\], but must have shape \[2\]",
        ),
        ({"loss_budget": lost(torch.int32)}, "loss_budget.lost has dtype torch.int32"),
        ({"loss_budget": lost(rate=torch.zeros(2))}, "loss_budget.rate has dtype torch.float32"),
    ],
)
def test_a_bad_price_or_bound_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        verify_greedy(**arguments(**changes))


def poisoned(batch=2, width=3, num_draft=3, **changes):
    buffers = {
        "output_token_ids": torch.full((batch, width), -7, dtype=torch.int32),
        "num_accepted": torch.full((batch,), -7, dtype=torch.int32),
        "num_relaxed": torch.full((batch,), -7, dtype=torch.int32),
        "lost": torch.full((batch,), -7),
        "top2_values": torch.full((num_draft, 2), -7.0),
        "verdicts": torch.full((num_draft,), -7, dtype=torch.int8),
        "losses": torch.full((num_draft,), -7, dtype=torch.int32),
    }
    return VerifyOutput(**(buffers | changes))


def test_results_go_into_the_given_buffers():
    torch.manual_seed(0)
    given = arguments(logits=torch.randn(3, 5))
    # In a dry run the values of all positions are written.
    wanted = {"with_verdicts": True, "dry_run": True}
    expected = verify_greedy(**given, **wanted)
    out = poisoned()
    assert verify_greedy(**given, **wanted, out=out) is out
    for buffer, result in zip(out, expected, strict=True):
        assert torch.equal(buffer, result)


def test_buffers_of_verdicts_stay_untouched_unless_asked_for():
    out = poisoned()
    verify_greedy(**arguments(), out=out)
    assert torch.equal(out.top2_values, poisoned().top2_values)
    assert torch.equal(out.verdicts, poisoned().verdicts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_accepted": torch.zeros(2)}, "out.num_accepted has dtype torch.float32"),
        (
            {"output_token_ids": torch.zeros(2, 4, dtype=torch.int32)},
            r"out.output_token_ids has shape \[2, 4\], but must have shape \[2, 3\]",
        ),
        ({"top2_values": None}, "out.top2_values is None, but with_verdicts needs a buffer there"),
        ({"verdicts": None}, "out.verdicts is None, but with_verdicts needs a buffer there"),
        (
            {"num_relaxed": torch.zeros(4, dtype=torch.int32)[::2]},
            r"out.num_relaxed has strides \[2\], but must be contiguous",
        ),
    ],
)
def test_wrong_buffer_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        verify_greedy(**arguments(), with_verdicts=True, out=poisoned(**changes))


def test_input_tokens_are_the_same_rule_in_another_layout():
    """Requests of 2, 0 and 1 drafts; row by row: drafts, then the bonus row."""
    torch.manual_seed(1)
    logits = torch.randn(6, 5) + 2
    inputs = torch.tensor([4, 1, 2, 0, 3, 3])
    ends = torch.tensor([3, 4, 6], dtype=torch.int32)
    expected = verify_greedy(
        logits,
        torch.tensor([1, 2, 3]),
        torch.tensor([2, 2, 3], dtype=torch.int32),
        None,
        0.8,
        target_rows=torch.tensor([0, 1, 4]),
        bonus_rows=torch.tensor([2, 3, 5]),
        max_draft_len=2,
    )
    rows = Drafts(logits, inputs, ends, max_draft_len=2, bonus_row_is_last=True)
    output = verify_drafts(rows, Margin(0.8))
    assert output.output_token_ids.dtype == torch.int64
    assert output.output_token_ids.tolist() == expected.output_token_ids.tolist()
    assert torch.equal(output.num_accepted, expected.num_accepted)
    assert torch.equal(output.num_relaxed, expected.num_relaxed)
