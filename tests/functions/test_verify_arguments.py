"""Errors of `verify_greedy` name the wrong argument and the rule."""

import pytest
import torch

from vllm_mars import verify_greedy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(5, 5, dtype=torch.float64)}, "logits has dtype torch.float64"),
        ({"logits": torch.zeros(5)}, "logits has 1 dimensions"),
        ({"logits": torch.zeros(5, 3).T}, r"logits has strides \[1, 3\]"),
        (
            {"draft_token_ids": torch.zeros(6, dtype=torch.int32)[::2]},
            r"draft_token_ids has strides \[2\], but must be contiguous",
        ),
        ({"logits": torch.zeros(3, 5)}, "logits has 3 rows for 3 draft tokens of 2 requests"),
        ({"draft_token_ids": torch.zeros(3)}, "draft_token_ids has dtype torch.float32"),
        ({"draft_token_ids": torch.zeros(3, 1, dtype=torch.int32)}, "must have one dimension"),
        (
            {"cu_num_draft_tokens": torch.tensor([1, 3])},
            "cu_num_draft_tokens has dtype torch.int64",
        ),
        ({"theta": None}, "Exactly one of theta and price .*; none of them is given"),
        ({"price": 0.5}, "Exactly one of .* names the rule; theta=0.9 and price=0.5 is given"),
        ({"theta": 0.0}, r"theta=0.0 is outside \(0, 1\]"),
        ({"theta": float("nan")}, "theta=nan is outside"),
        ({"theta": torch.ones(3)}, r"theta has shape \[3\], but must have shape \[2\]"),
        ({"theta": torch.ones(2).double()}, "theta has dtype torch.float64"),
        ({"theta": None, "price": -1.0}, r"price=-1.0 is outside \[0, 8192\]; 0 switches"),
        ({"theta": None, "price": torch.ones(3)}, r"price has shape \[3\], but must have"),
        ({"protected": torch.zeros(4, dtype=torch.bool)}, r"protected has shape \[4\]"),
        ({"protected": torch.zeros(5)}, "protected has dtype torch.float32"),
        ({"logits": torch.zeros(5, 5, device="meta")}, "is on cpu, but logits are on meta"),
    ],
)
def test_errors_name_the_wrong_argument(changes, message):
    arguments = {
        "logits": torch.zeros(5, 5),
        "draft_token_ids": torch.tensor([1, 2, 3]),
        "cu_num_draft_tokens": torch.tensor([1, 3], dtype=torch.int32),
        "theta": 0.9,
    }
    with pytest.raises(ValueError, match=message):
        verify_greedy(**arguments | changes)
