"""Compares the kinds of tokens in answers with those of the target at the same positions.

Kinds: tokens that complete a repeated n-gram, end a sentence, break a line, begin a word with a
capital, have a non-ASCII character, or are not in the draft's vocabulary. Each kind has three sums
over an answer:

    served        tokens of the kind
    by reports    the same, weighted by the reported p / m; its mean is that of the target
    by target     the target's probability of the kind, from a separate forward pass

In greedy answers only relaxed tokens count, `by target` counts the argmax at their positions, and
`by reports` has no meaning.
"""

import math
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from vllm_mars.kernels.constraints.naive import NgramIndex

if TYPE_CHECKING:
    import torch

LONGEST = 4
KINDS = (
    "2-grams again",
    "3-grams again",
    "4-grams again",
    "sentence ends",
    "line breaks",
    "capitals",
    "not ASCII",
    "not in the draft's vocabulary",
)
SUMS = ("served", "by reports", "by target")
COLUMNS = tuple(f"{kind}, {which}" for kind in KINDS for which in SUMS)


def told_of_tokens(answer: Any) -> list[float]:
    """Returns the log-ratio of each token or, if greedy, whether it is relaxed."""
    report: dict[str, Any] = getattr(answer.spec_decode_metrics, "mars", None) or {}
    count = len(answer.token_ids)
    if "log_ratios" in report:
        return list(report["log_ratios"])
    relaxed = report.get("relaxed_positions", ())
    return [float(position in relaxed) for position in range(count)]


class Kinds:
    """The kinds of a tokenizer's tokens; `proposed` is the draft's vocabulary, None for all."""

    def __init__(
        self, tokenizer: Any, vocab: int, device: Any, proposed: Set[int] | None = None
    ) -> None:
        import torch

        texts = tokenizer.batch_decode([[token] for token in range(min(len(tokenizer), vocab))])
        is_of_kind = [
            [
                text.rstrip()[-1:] in (".", "!", "?") and bool(text.strip()),
                "\n" in text,
                text[:1] == " " and text[1:2].isupper(),
                not text.isascii(),
                proposed is not None and token not in proposed,
            ]
            for token, text in enumerate(texts)
        ]
        is_of_kind += [[False] * len(is_of_kind[0])] * (vocab - len(is_of_kind))
        # [vocab, kinds]
        self._is_of_kind = torch.tensor(is_of_kind, dtype=torch.float32, device=device)

    def sums(
        self, tokens: Sequence[int], reports: Sequence[float], log_p: "torch.Tensor", sampled: bool
    ) -> "torch.Tensor":
        """Returns the sums of one answer, float32 `[len(COLUMNS)]`.

        Args:
            reports: log m - log p of each token or, if greedy, whether it is relaxed.
            log_p: float32 `[len(tokens), vocab]`, the target's at the request's temperature.
        """
        import torch

        token_ids = torch.tensor(list(tokens), device=log_p.device)
        factors = [math.exp(-value) if sampled else bool(value) for value in reports]
        weights = torch.tensor(factors).to(log_p)
        p = log_p.exp()
        if not sampled:
            p = torch.nn.functional.one_hot(log_p.argmax(1), log_p.shape[1]) * weights[:, None]
        counted = torch.ones_like(weights) if sampled else weights
        is_kind = self._is_of_kind[token_ids].T
        expected = [*(p @ self._is_of_kind).sum(0)]
        followers = [*NgramIndex(LONGEST).before((), tokens)]
        is_repeated, expected_repeats = [], []
        for n in range(LONGEST - 1):
            repeats = [by_length[n] if n < len(by_length) else set() for by_length in followers]
            pairs = [(row, token) for row, listed in enumerate(repeats) for token in listed]
            rows, ids = torch.tensor(pairs or [(0, 0)], device=log_p.device).T
            expected_repeats.append(p[rows, ids].sum() if pairs else p.new_zeros(()))
            is_repeated.append([token in of for token, of in zip(tokens, repeats, strict=True)])
        # [kinds, tokens]
        indicators = torch.cat([torch.tensor(is_repeated).to(log_p), is_kind])
        by_target = torch.stack([*expected_repeats, *expected])
        return torch.stack([indicators @ counted, indicators @ weights, by_target], 1).flatten()
