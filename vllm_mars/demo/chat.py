"""Timed and scored chat requests to one vLLM server, through the official OpenAI client."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from vllm_mars.local.scrape import GENERATED_TOKENS, drafted, openai_client
from vllm_mars.local.server import VllmServer

REQUEST_TIMEOUT = 600.0
METRICS_TIMEOUT = 5.0


@dataclass(frozen=True)
class Answer:
    """One timed answer.

    Attributes:
        seconds, first_token_seconds: from sending the request to the end of the stream, and to the
            first text.
        prompt_tokens: with the chat template.
        drafts: verification steps; 0 without speculative decoding.
        draft_tokens, accepted_tokens: those that were verified, and of them those accepted.
        finish_reason: "stop" or "length".
        relaxed_positions: those that only the margin accepted, counted from 0; empty where the
            server was not asked.
        loss_nats: what they lost against the target's first choices, in sum.
    """

    text: str
    seconds: float
    first_token_seconds: float
    prompt_tokens: int
    output_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    finish_reason: str
    token_ids: tuple[int, ...] = ()
    relaxed_positions: tuple[int, ...] = ()
    loss_nats: float = 0.0

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.seconds - self.first_token_seconds) / (self.output_tokens - 1)


@dataclass(frozen=True)
class ScoredToken:
    """An output token beside the target's first choice, with both log probabilities there."""

    text: str
    logprob: float
    best_text: str
    best_logprob: float

    @property
    def relaxed(self) -> bool:
        """Whether only the margin accepted it: a greedy target emits its best token otherwise."""
        return self.logprob < self.best_logprob


class ChatClient:
    """Sends greedy chat requests to a server, one at a time."""

    def __init__(self, server: VllmServer) -> None:
        """Connects to a server that is ready."""
        self.server = server
        self._client = openai_client(server.base_url, REQUEST_TIMEOUT)
        with self._reported():
            # Not the directory's name where the server was given another.
            self._model = self._client.models.list().data[0].id

    def ask(
        self, messages: Sequence[dict[str, str]], max_tokens: int, *, tell_relaxed: bool = False
    ) -> Answer:
        """Streams one greedy answer and measures it.

        Args:
            messages: the conversation, as the OpenAI API takes it.
            max_tokens: limit of the answer's length.
            tell_relaxed: whether a server of MARS shall say which tokens it relaxed.

        Raises:
            RuntimeError: the server failed, ended or did not answer in time; the message holds the
                end of its log.
        """
        before = self.server.metrics()
        told = {"vllm_xargs": {"mars_return": True}} if tell_relaxed else {}
        text, finish_reason, first, usage = "", "", 0.0, None
        token_ids: list[int] = []
        relaxed: dict[str, list[Any]] = {"relaxed_positions": [], "loss_nats": []}
        start = time.perf_counter()
        with self._reported():
            stream = self._client.chat.completions.create(
                model=self._model,
                messages=cast(Any, messages),
                max_tokens=max_tokens,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True, **told},
            )
            for chunk in stream:
                usage = chunk.usage or usage
                if tell_relaxed and chunk.usage is not None:
                    relaxed = cast(Any, chunk).metrics["speculative_decoding"]["mars"]
                for choice in chunk.choices:
                    token_ids += getattr(choice, "token_ids", None) or []
                    if choice.delta.content:
                        first = first or time.perf_counter() - start
                        text += choice.delta.content
                    finish_reason = choice.finish_reason or finish_reason
        seconds = time.perf_counter() - start
        if usage is None or not finish_reason:
            raise self._failure("the stream ended early")
        after = self._metrics_after(before.get(GENERATED_TOKENS, 0.0) + usage.completion_tokens)
        return Answer(
            text=text,
            seconds=seconds,
            first_token_seconds=first,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            **drafted(before, after),
            finish_reason=finish_reason,
            token_ids=tuple(token_ids),
            relaxed_positions=tuple(relaxed["relaxed_positions"]),
            loss_nats=sum(relaxed["loss_nats"]),
        )

    def score(
        self, messages: Sequence[dict[str, str]], max_tokens: int
    ) -> tuple[str, list[ScoredToken]]:
        """The text and tokens of one greedy answer, each beside the target's first choice."""
        with self._reported():
            completion = self._client.chat.completions.create(
                model=self._model,
                messages=cast(Any, messages),
                max_tokens=max_tokens,
                temperature=0.0,
                logprobs=True,
                # vLLM lists the emitted token first and then the best: two hold both.
                top_logprobs=2,
            )
        choice = completion.choices[0]
        if choice.logprobs is None or choice.logprobs.content is None:
            raise self._failure("the answer has no logprobs")
        tokens = []
        for token in choice.logprobs.content:
            best = max(token.top_logprobs, key=lambda top: top.logprob)
            tokens.append(ScoredToken(token.token, token.logprob, best.token, best.logprob))
        return choice.message.content or "", tokens

    def token_texts(self, token_ids: Iterable[int]) -> dict[int, str]:
        """The text of each token, which is not whole where a character takes several."""
        with self._reported():
            return {
                token_id: self._client.post(
                    f"{self.server.base_url}/detokenize",
                    cast_to=cast(Any, object),
                    body={"model": self._model, "tokens": [token_id]},
                )["prompt"]
                for token_id in token_ids
            }

    def _metrics_after(self, generated_tokens: float) -> dict[str, float]:
        """Reads the metrics once they count the answer, which may be shortly after its end."""
        deadline = time.monotonic() + METRICS_TIMEOUT
        while True:
            metrics = self.server.metrics()
            if metrics.get(GENERATED_TOKENS, 0.0) >= generated_tokens:
                return metrics
            if time.monotonic() > deadline:
                raise self._failure(
                    f"{GENERATED_TOKENS}={metrics.get(GENERATED_TOKENS)} is below "
                    f"{generated_tokens:g}; is the server shared?"
                )
            time.sleep(0.02)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Raises what the client raises as a failure of the server."""
        import openai

        try:
            yield
        except openai.OpenAIError as error:
            raise self._failure(error) from error

    def _failure(self, problem: object) -> RuntimeError:
        self.server.check_alive("while answering")
        return RuntimeError(
            f"a request to {self.server.base_url} failed: {problem}\n{self.server.log_tail()}"
        )
