"""What the demo measured, and the figures drawn from it."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_mars.demo.chat import Answer, ScoredToken
from vllm_mars.demo.options import MODES, DemoOptions
from vllm_mars.local.intervals import median
from vllm_mars.local.prompts import Prompt

SCHEMA = 2
PAIRS = (("strict", "autoregressive"), ("mars", "autoregressive"), ("mars", "strict"))


@dataclass(frozen=True)
class Record:
    """One answer of one server, to what was sent in one turn of a prompt in one timed pass."""

    prompt: Prompt
    turn: int
    repeat: int
    messages: list[dict[str, str]]
    answer: Answer

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values, without messages and what names one token."""
        measured = vars(self.answer).items()
        return {
            "id": self.prompt.id,
            "category": self.prompt.category,
            "turn": self.turn,
            "repeat": self.repeat,
            **{k: v for k, v in measured if k not in ("token_ids", "relaxed_positions")},
        }


@dataclass(frozen=True)
class Example:
    """The MARS answer with the most relaxed tokens; `text` and `tokens` are asked once more."""

    record: Record
    text: str
    tokens: list[ScoredToken]


@dataclass(frozen=True)
class Speedup:
    """The median, over so many prompts, of the other mode's time over this mode's.

    Its 95 % interval, from `low` to `high`, is by bootstrap over prompts.
    """

    prompts: int
    median: float
    low: float
    high: float


def speedup(ratios: Iterable[float]) -> Speedup | None:
    """Returns the median of the prompts' ratios with its interval; None without any."""
    values = list(ratios)
    return Speedup(len(values), *median(values)) if values else None


@dataclass
class Results:
    """Everything measured, by mode, and the head of the result file."""

    options: DemoOptions
    model: str
    run: dict[str, Any]
    records: dict[str, list[Record]] = field(default_factory=lambda: {m: [] for m in MODES})
    token_texts: dict[int, str] = field(default_factory=dict)
    example: Example | None = None

    def first_pass(self, mode: str) -> list[Record]:
        """Returns one record for each answer: at temperature 0 repeats differ in time alone."""
        return [record for record in self.records[mode] if record.repeat == 0]

    def times(self, mode: str, name: str) -> dict[tuple[str, int], float]:
        """Each answer's median over the repeats of a time of `Answer`, by prompt id and turn.

        An answer that has none in any repeat is left out.
        """
        found: dict[tuple[str, int], list[float]] = {}
        for record in self.records[mode]:
            seconds = getattr(record.answer, name)
            if seconds is not None:
                found.setdefault((record.prompt.id, record.turn), []).append(seconds)
        return {key: statistics.median(repeats) for key, repeats in found.items()}

    def summary(self, mode: str) -> dict[str, Any]:
        """Returns the figures of one mode, as docs/demo.md describes them."""
        first = [record.answer for record in self.first_pass(mode)]
        seconds = sum(self.times(mode, "seconds").values())
        drafts = sum(answer.drafts for answer in first)
        accepted = sum(answer.accepted_tokens for answer in first)
        output_tokens = sum(answer.output_tokens for answer in first)
        tpots = self.times(mode, "tpot_seconds").values()
        figures: dict[str, Any] = {
            "tokens_per_second": output_tokens / seconds,
            "seconds_per_answer": seconds / len(first),
            "ttft_seconds": statistics.median(self.times(mode, "first_token_seconds").values()),
            "tpot_seconds": statistics.median(tpots) if tpots else None,
            "tokens_per_answer": output_tokens / len(first),
            "output_tokens": output_tokens,
            "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
            "verified_tokens": sum(answer.draft_tokens for answer in first),
            "accepted_tokens": accepted,
            "equal_answers": len(first) - len(self._differing(mode)),
        }
        if mode == "mars":
            relaxed = sum(len(answer.relaxed_positions) for answer in first)
            figures |= {
                "theta": self.options.theta,
                "relaxed_tokens": relaxed,
                "relaxed_share": relaxed / output_tokens,
                "loss_nats_per_token": sum(answer.loss_nats for answer in first) / output_tokens,
            }
        return figures

    def speedups(self, mode: str, other: str) -> dict[str, Speedup | None]:
        """Returns how much faster a mode is than another, per output token and per answer."""
        return {
            "tpot": speedup(self.ratios(mode, other, "tpot_seconds").values()),
            "seconds": speedup(self.ratios(mode, other, "seconds").values()),
        }

    def ratios(self, mode: str, other: str, name: str) -> dict[str, float]:
        """By prompt id, the other mode's time over this mode's, each summed over its turns.

        Turns whose time is 0 or missing in a mode are left out.
        """
        sums: dict[str, list[float]] = {}
        others = self.times(other, name)
        for (prompt, turn), mine in self.times(mode, name).items():
            theirs = others.get((prompt, turn))
            if mine and theirs:
                total = sums.setdefault(prompt, [0.0, 0.0])
                total[0] += theirs
                total[1] += mine
        return {prompt: theirs / mine for prompt, (theirs, mine) in sums.items()}

    def kinds(self) -> dict[str, float]:
        """Returns, by kind of prompt, the median of strict TPOT over MARS TPOT; the best first."""
        category = {record.prompt.id: record.prompt.category for record in self.records["mars"]}
        groups: dict[str, list[float]] = {}
        for name, ratio in self.ratios("mars", "strict", "tpot_seconds").items():
            groups.setdefault(category[name] or "(no category)", []).append(ratio)
        medians = {kind: statistics.median(ratios) for kind, ratios in groups.items()}
        return dict(sorted(medians.items(), key=lambda item: -item[1]))

    def changed_lengths(self) -> list[tuple[Record, Record]]:
        """Strict and MARS records of answers that differ in length, the largest change first."""

        def change(pair: tuple[Record, Record]) -> int:
            return abs(pair[1].answer.output_tokens - pair[0].answer.output_tokens)

        pairs = zip(self.first_pass("strict"), self.first_pass("mars"), strict=True)
        return sorted(filter(change, pairs), key=change, reverse=True)

    def comparison(self) -> dict[str, Any]:
        """Returns the ratios between the modes and the prompts whose strict text differs."""
        speed = {mode: self.summary(mode)["tokens_per_second"] for mode in MODES}
        differing = self._differing("strict")
        return {
            **{f"{mode}_over_{other}": speed[mode] / speed[other] for mode, other in PAIRS},
            "strict_text_equals_autoregressive": not differing,
            "differing_prompts": sorted({record.prompt.id for record in differing}),
            "differing_prompts_compares": ["strict", "autoregressive"],
            "speedup": {
                f"{mode}_over_{other}": {
                    name: None if found is None else asdict(found)
                    for name, found in self.speedups(mode, other).items()
                }
                for mode, other in PAIRS
            },
            "kinds_tpot_mars_over_strict": self.kinds(),
            "changed_lengths": [
                {
                    "id": strict.prompt.id,
                    "turn": strict.turn,
                    "strict": strict.answer.output_tokens,
                    "mars": mars.answer.output_tokens,
                }
                for strict, mars in self.changed_lengths()
            ],
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the result file's content (docs/demo.md)."""
        options = self.options
        content: dict[str, Any] = {
            "schema": SCHEMA,
            **self.run,
            "config": {
                "model": Path(self.model).name,
                "draft": options.draft_name,
                "num_speculative_tokens": options.num_speculative_tokens,
                "max_tokens": options.max_tokens,
                "repeats": options.repeats,
                "short": options.short,
                "prompts": options.prompts.name,
                "speculative_config": {m: self._named_config(m) for m in MODES},
                "server_args": list(options.server_args),
            },
            "comparison": self.comparison(),
        }
        for mode in MODES:
            content[mode] = self.summary(mode)
            content[mode]["answers"] = [record.to_json() for record in self.records[mode]]
        content["mars"]["relaxed"] = [
            {
                "id": record.prompt.id,
                "turn": record.turn,
                "tokens": [
                    {"position": i, "text": self.token_texts[record.answer.token_ids[i]]}
                    for i in record.answer.relaxed_positions
                ],
            }
            for record in self.first_pass("mars")
        ]
        if self.example is not None:
            content["mars"]["example"] = {
                "id": self.example.record.prompt.id,
                "turn": self.example.record.turn,
                "same_text": self.example.text == self.example.record.answer.text,
                "tokens": [
                    {"position": i, **vars(token)}
                    for i, token in enumerate(self.example.tokens)
                    if token.relaxed
                ],
            }
        return content

    def _differing(self, mode: str) -> list[Record]:
        """Returns a mode's answers whose text is not that of the autoregressive server."""
        plain = self.first_pass("autoregressive")
        return [
            record
            for record, other in zip(self.first_pass(mode), plain, strict=True)
            if record.answer.text != other.answer.text
        ]

    def _named_config(self, mode: str) -> dict[str, Any] | None:
        """Returns a mode's speculative config with the draft's name for its path."""
        config = self.options.speculative_config(mode)
        if config is not None and "model" in config:
            config["model"] = self.options.draft_name
        return config
