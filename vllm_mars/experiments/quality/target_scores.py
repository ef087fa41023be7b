"""What the target itself thinks of an answer: how likely each token is, and its own choices."""

import functools
import heapq
import json
import urllib.error
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vllm_mars.experiments.sweep.records import OffChoice
from vllm_mars.local.scrape import fetch

TIMEOUT = 600.0
# Prompt logprobs hold the logits of whole prompts: few at a time.
PARALLEL = 4
# Tokens of each answer in which `TargetScorer.rounding` looks.
ROUNDING_TOKENS = 32


@dataclass(frozen=True)
class Scored:
    """An answer under the target.

    Attributes:
        nll: mean negative log-likelihood per token in nats.
        loss: mean of log p(the target's first choice) - log p(token), in nats.
        off_choice: the tokens that are not the target's first choice.
        prompt_tokens: tokens of the prompt, chat template included.
        gaps: by which the largest logit leads the second largest, at each token, in nats.
    """

    nll: float
    loss: float
    off_choice: tuple[OffChoice, ...]
    prompt_tokens: int
    gaps: tuple[float, ...]


class TargetScorer:
    """Scores texts with an autoregressive server of the target.

    The answer's text is tokenized again, which for a sampled answer need not give the tokens that
    were generated; the end-of-sequence token is not counted.
    """

    def __init__(self, base_url: str, model: str) -> None:
        """Loads the tokenizer of a model, named as for the server, which is without `/v1`."""
        from transformers import AutoTokenizer

        self._base_url = base_url
        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def token_ids(self, text: str) -> list[int]:
        """Tokenizes an answer."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def score_all(self, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Scored]:
        """Scores pairs of a prompt and an answer that is not empty.

        Of an answer that fills the server's context the end is left out, since as a prompt the
        context has no room for it; an answer of which nothing is left has no score.

        Raises:
            RuntimeError: the server fails or gives no logprobs of the prompt.
        """
        unique = list(dict.fromkeys(pairs))
        with ThreadPoolExecutor(PARALLEL) as pool:
            scores = pool.map(lambda pair: self._score(*pair), unique)
            return {pair: it for pair, it in zip(unique, scores, strict=True) if it is not None}

    @functools.cache  # noqa: B019 - lives as long as one sweep's scorer
    def _prompt_ids(self, prompt: str) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        return [int(token) for token in ids]

    def _score(self, prompt: str, text: str) -> Scored | None:
        prompt_ids = self._prompt_ids(prompt)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answer_ids = [int(token) for token in encoded["input_ids"]]
        rows = self._logprobs(prompt_ids, answer_ids)
        if not rows:
            return None
        logprobs, off_choice = [], []
        for position, (token, row) in enumerate(zip(answer_ids, rows, strict=False)):
            own = row[str(token)]
            logprobs.append(own["logprob"])
            best = max(row.values(), key=lambda entry: entry["logprob"])
            if best["logprob"] > own["logprob"]:
                start, end = encoded["offset_mapping"][position]
                off_choice.append(
                    OffChoice(
                        position=position,
                        start=int(start),
                        end=int(end),
                        text=text[start:end],
                        logprob=own["logprob"],
                        best_text=best["decoded_token"] or "",
                        best_logprob=best["logprob"],
                    )
                )
        return Scored(
            nll=-sum(logprobs) / len(logprobs),
            loss=sum(token.loss for token in off_choice) / len(logprobs),
            off_choice=tuple(off_choice),
            prompt_tokens=len(prompt_ids),
            gaps=_gaps(rows),
        )

    def rounding(self, prompts: Sequence[str]) -> float:
        """How far rounding moves the gap between the two largest logits: a smaller one may flip.

        Each prompt is answered alone, all are answered in one batch, and the answers are read as
        prompts. At one token of one text the three gaps differ by rounding alone.

        Returns:
            The largest of these differences in nats.

        Raises:
            RuntimeError: as `score_all`.
        """
        ids = [self._prompt_ids(prompt) for prompt in prompts]
        alone = [answer for one in ids for answer in self._answers([one])]
        moved = 0.0
        for prompt, one, other in zip(ids, alone, self._answers(ids), strict=True):
            tokens = [token for token, _ in one]
            for (token, gap), (other_token, other_gap) in zip(one, other, strict=False):
                moved = max(moved, abs(gap - other_gap))
                if token != other_token:
                    break
            gaps = _gaps(self._logprobs(prompt, tokens))
            moved = max([moved, *(abs(mine[1] - it) for mine, it in zip(one, gaps, strict=False))])
        return moved

    def _answers(self, prompts: Sequence[list[int]]) -> list[list[tuple[int, float]]]:
        """Greedy answers in one batch: each token with the gap at its place."""
        choices = self._asked(
            "logprobs",
            prompt=prompts,
            max_tokens=ROUNDING_TOKENS,
            logprobs=2,
            # Two tokens can have one text, and would be one entry.
            return_tokens_as_token_ids=True,
        )
        return [
            [
                (int(token.removeprefix("token_id:")), _gap(row.values()))
                for token, row in zip(found["tokens"], found["top_logprobs"], strict=True)
            ]
            for found in (choice["logprobs"] for choice in choices)
        ]

    def _logprobs(self, prompt: list[int], answer: list[int]) -> list[dict[str, Any]]:
        """Of each token of an answer that fits the context: itself, the target's two choices."""
        # One token is generated.
        ids = (prompt + answer)[: self._context - 1]
        (choice,) = self._asked("prompt_logprobs", prompt=ids, max_tokens=1, prompt_logprobs=2)
        rows: list[dict[str, Any]] = choice["prompt_logprobs"][len(prompt) :]
        return rows

    @functools.cached_property
    def _context(self) -> int:
        """Most tokens of a prompt and its answer."""
        try:
            models = json.loads(fetch(f"{self._base_url}/v1/models", TIMEOUT))["data"]
            return int(models[0]["max_model_len"])
        except (OSError, ValueError, LookupError) as error:
            raise RuntimeError(f"{self._base_url} does not name its context: {error!r}") from error

    def _asked(self, wanted: str, **body: Any) -> list[dict[str, Any]]:
        """The choices of a greedy completion, each with the field that is wanted."""
        try:
            sent = {"model": self._model, "temperature": 0, **body}
            choices: list[dict[str, Any]] = json.loads(fetch(self._url, TIMEOUT, sent))["choices"]
            if all(choice[wanted] for choice in choices):
                return choices
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise RuntimeError(f"{self._url} refused {wanted}: {detail}") from error
        except (OSError, ValueError, LookupError) as error:
            raise RuntimeError(f"{self._url} gave no {wanted}: {error!r}") from error
        raise RuntimeError(f"{self._url} gave no {wanted}.")


def _gaps(rows: Iterable[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(_gap(entry["logprob"] for entry in row.values()) for row in rows)


def _gap(logprobs: Iterable[float]) -> float:
    """What the largest is above the second largest, at least two being given."""
    largest, second = heapq.nlargest(2, logprobs)
    return largest - second
