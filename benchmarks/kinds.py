"""Which kinds of tokens answers have, beside what the target would have had in their places.

Of each position of an answer, given the text before it: a token may complete an n-gram that the
answer holds, end a sentence, break a line, begin a word with a capital, hold a character outside
ASCII, or be none that the draft can propose. Three numbers say how often, as sums over the answer:

    served        tokens of the kind that came
    by reports    the same, each weighed by p / m of its report: in expectation what the target has
    by target     the target's probability of the kind, from a forward pass that knows no report

Of a greedy answer the relaxed tokens count alone, `by target` are the target's first choices in
their places, and there is nothing by reports.
"""

import math
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from vllm_mars.kernels.constraints.naive import NgramIndex

if TYPE_CHECKING:
    import torch

LONGEST = 4
KINDS = (
    *(f"{n}-grams again" for n in range(2, LONGEST + 1)),
    "sentence ends",
    "line breaks",
    "capitals",
    "not ASCII",
    "not in the draft's vocabulary",
)
SUMS = ("served", "by reports", "by target")
COLUMNS = tuple(f"{kind}, {which}" for kind in KINDS for which in SUMS)


def told_of_tokens(answer: Any) -> list[float]:
    """Of each token of an answer its log-ratio, or whether it is relaxed: see `kinds.Kinds`."""
    report: dict[str, Any] = getattr(answer.spec_decode_metrics, "mars", None) or {}
    count = len(answer.token_ids)
    if "log_ratios" in report:
        return list(report["log_ratios"])
    relaxed = report.get("relaxed_positions", ())
    return [float(at in relaxed) for at in range(count)]


class Kinds:
    """The kinds of a tokenizer's tokens.

    Args:
        tokenizer: of transformers.
        vocab: width of the logits.
        device: of the logits.
        proposed: the tokens that the draft can propose; None for all.
    """

    def __init__(
        self, tokenizer: Any, vocab: int, device: Any, proposed: Set[int] | None = None
    ) -> None:
        import torch

        texts = tokenizer.batch_decode([[token] for token in range(min(len(tokenizer), vocab))])
        found = [
            [
                text.rstrip()[-1:] in (".", "!", "?") and bool(text.strip()),
                "\n" in text,
                text[:1] == " " and text[1:2].isupper(),
                not text.isascii(),
                proposed is not None and token not in proposed,
            ]
            for token, text in enumerate(texts)
        ]
        found += [[False] * len(found[0])] * (vocab - len(found))
        self._of_token = torch.tensor(found, dtype=torch.float32, device=device)

    def sums(
        self, tokens: Sequence[int], told: Sequence[float], log_p: "torch.Tensor", sampled: bool
    ) -> "torch.Tensor":
        """The numbers of one answer, in the order of `COLUMNS`; float32 `[len(COLUMNS)]`.

        Args:
            tokens: of the answer.
            told: of each, log m - log p where the request samples, else whether it is relaxed.
            log_p: float32 `[len(tokens), vocab]`, of the target at the request's temperature.
            sampled: whether the request does.
        """
        import torch

        own = torch.tensor(list(tokens), device=log_p.device)
        weights = torch.tensor([math.exp(-it) if sampled else bool(it) for it in told]).to(log_p)
        p = log_p.exp()
        if not sampled:
            p = torch.nn.functional.one_hot(log_p.argmax(1), log_p.shape[1]) * weights[:, None]
        counted = torch.ones_like(weights) if sampled else weights
        is_kind = self._of_token[own].T
        expected = [*(p @ self._of_token).sum(0)]
        again = [*NgramIndex(LONGEST).before((), tokens)]
        is_again, of_target = [], []
        for n in range(LONGEST - 1):
            lists = [by_length[n] if n < len(by_length) else set() for by_length in again]
            pairs = [(row, token) for row, of in enumerate(lists) for token in of]
            rows, ids = torch.tensor(pairs or [(0, 0)], device=log_p.device).T
            of_target.append(p[rows, ids].sum() if pairs else p.new_zeros(()))
            is_again.append([token in of for token, of in zip(tokens, lists, strict=True)])
        each = torch.cat([torch.tensor(is_again).to(log_p), is_kind])
        by_target = torch.stack([*of_target, *expected])
        return torch.stack([each @ counted, each @ weights, by_target], 1).flatten()
