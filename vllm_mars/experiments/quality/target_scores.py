"""What the target itself thinks of an answer: log probability of each token, and its own choice."""

import functools
import json
import urllib.error
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vllm_mars.experiments.sweep.records import OffChoice
from vllm_mars.local.scrape import fetch

TIMEOUT = 600.0
# Prompt logprobs hold the logits of whole prompts: few at a time.
PARALLEL = 4


@dataclass(frozen=True)
class Scored:
    """An answer under the target.

    Attributes:
        nll: mean negative log-likelihood per token in nats.
        loss: mean of log p(the target's first choice) - log p(token), in nats.
        off_choice: the tokens that are not the target's first choice.
        prompt_tokens: tokens of the prompt, chat template included.
    """

    nll: float
    loss: float
    off_choice: tuple[OffChoice, ...]
    prompt_tokens: int


class TargetScorer:
    """Scores texts with an autoregressive server of the target.

    The answer's text is tokenized again, which for a sampled answer need not give the tokens that
    were generated; the end-of-sequence token is not counted.
    """

    def __init__(self, base_url: str, model: str) -> None:
        """Loads the tokenizer.

        Args:
            base_url: the server, without `/v1`.
            model: the target, as the server was given it.
        """
        from transformers import AutoTokenizer

        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def token_ids(self, text: str) -> list[int]:
        """Tokenizes an answer."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def score_all(self, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Scored]:
        """Scores answers.

        Args:
            pairs: (prompt, answer) with an answer that is not empty.

        Raises:
            RuntimeError: the server fails or gives no logprobs of the prompt.
        """
        unique = list(dict.fromkeys(pairs))
        with ThreadPoolExecutor(PARALLEL) as pool:
            return dict(zip(unique, pool.map(lambda pair: self._score(*pair), unique), strict=True))

    @functools.cache  # noqa: B019 - lives as long as one sweep's scorer
    def _prompt_ids(self, prompt: str) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        return [int(token) for token in ids]

    def _score(self, prompt: str, text: str) -> Scored:
        prompt_ids = self._prompt_ids(prompt)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answer_ids = [int(token) for token in encoded["input_ids"]]
        rows = self._prompt_logprobs(prompt_ids + answer_ids)[len(prompt_ids) :]
        logprobs, off_choice = [], []
        for position, (token, row) in enumerate(zip(answer_ids, rows, strict=True)):
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
        )

    def _prompt_logprobs(self, ids: list[int]) -> list[dict[str, Any]]:
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            # The token itself and the target's first choice.
            "prompt_logprobs": 1,
        }
        try:
            answer = json.loads(fetch(self._url, TIMEOUT, body))
            rows: list[dict[str, Any]] = answer["choices"][0]["prompt_logprobs"]
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise RuntimeError(f"{self._url} refused prompt_logprobs: {detail}") from error
        except (OSError, ValueError, LookupError) as error:
            raise RuntimeError(f"{self._url} gave no prompt_logprobs: {error!r}") from error
        return rows
