"""What a sweep measures, as its file (`record_file`) and the report know it.

A cell is what one client measured on one server with one setting of everything, once.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_mars.config import OPTION_PREFIX, STRICT_VALUE, check_value
from vllm_mars.experiments.metrics import METRICS
from vllm_mars.local.drafts import NO_DRAFT

Method = Literal["autoregressive", "standard", "block", "fly", "mars"]
Metric = Literal["ratio", "gap", "price"]
Status = Literal["ok", "failed", "unavailable"]
METHODS: tuple[Method, ...] = ("autoregressive", "standard", "block", "fly", "mars")


def further_options(protected: bool | None, options: str) -> dict[str, Any]:
    """The options of a server of "mars" besides its threshold; arguments as in `CellKey`."""
    unprotected: dict[str, Any] = {"mars_protected_token_ids": []} if protected is False else {}
    further: dict[str, Any] = json.loads(options or "{}")
    return unprotected | further


@dataclass(frozen=True)
class CellKey:
    """What a cell measured; a file holds each key once.

    Attributes:
        model: name of the target: the last part of its directory, or its name on the hub.
        draft: "ngram", the name of a draft's directory, or "none" without speculation.
        method: "autoregressive" is decoding without drafts; the others are vLLM's rejection sample
            methods and this project's "mars".
        metric: rule of "mars"; None for the other methods.
        theta, gap, price: threshold of metric "ratio", in (0, 1], of "gap" in nats, >= 0, or of
            "price" in nats per token gained, >= 0; the other two are None.
        protected: whether the default set of protected tokens is verified strictly (True) or no
            token is (False); None for methods other than "mars".
        k: draft tokens per step; 0 without speculation.
        temperature: sampling temperature; 0 is greedy.
        concurrency: most requests in flight.
        dataset: name of the prompts, such as the file's stem; of a block of them, with its number,
            as in "prompts#0".
        repeat: number of the pass, from 0.
        options: further `mars_*` options of the server, as JSON with sorted keys; "" for none.
    """

    model: str
    draft: str
    method: Method
    metric: Metric | None
    theta: float | None
    gap: float | None
    protected: bool | None
    k: int
    temperature: float
    concurrency: int
    dataset: str
    repeat: int
    price: float | None = None
    options: str = ""

    def __post_init__(self) -> None:
        self._check_method()
        for name, least in (("k", 0), ("repeat", 0), ("concurrency", 1), ("temperature", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}={value} is below {least}; give {least} or more.")
        for name in ("model", "draft", "dataset"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; a cell names its {name}.")

    def _check_method(self) -> None:
        if len({self.method == "autoregressive", self.draft == NO_DRAFT, self.k == 0}) > 1:
            raise ValueError(
                f"method={self.method!r} with draft={self.draft!r} and k={self.k}: method "
                f"'autoregressive', draft {NO_DRAFT!r} and k 0 go together."
            )
        values = {name: getattr(self, name) for name in METRICS.values()}
        if self.method != "mars":
            for name in ("metric", *values, "protected", "options"):
                if getattr(self, name) not in (None, ""):
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} belongs to method 'mars', but this is "
                        f"{self.method!r}; leave it null."
                    )
            return
        if self.metric is None or self.protected is None:
            raise ValueError(f"method 'mars' needs metric ({', '.join(METRICS)}) and protected.")
        needed = METRICS[self.metric]
        value = values.pop(needed)
        if value is None or any(other is not None for other in values.values()):
            raise ValueError(
                f"metric {self.metric!r} needs {needed}, and {', '.join(values)} null."
            )
        check_value(needed, value, needed)

    @property
    def lossy(self) -> bool:
        """Whether the rule can let through what the target would not have said."""
        if self.metric is None:
            return self.method == "fly"
        return (self.value or 0.0) != STRICT_VALUE[METRICS[self.metric]]

    @property
    def value(self) -> float | None:
        """What the metric compares with; None where there is no metric."""
        value: float | None = getattr(self, METRICS[self.metric]) if self.metric else None
        return value

    @property
    def looseness(self) -> float:
        """Sorts the rules of a metric from strict to loose."""
        return -(self.value or 0.0) if self.metric == "ratio" else self.value or 0.0

    @property
    def prompts(self) -> str:
        """The dataset that this one is a block of."""
        return re.sub(r"#\d+$", "", self.dataset)

    @property
    def label(self) -> str:
        """The key in a few words, such as "mars 0.9, ngram K4, T0, c1, prompts, #0"."""
        draft = [f"{self.draft} K{self.k}"] if self.k else []
        point = [f"T{self.temperature:g}", f"c{self.concurrency}", self.dataset]
        return ", ".join([self.rule, *draft, *point, f"#{self.repeat}"])

    @property
    def rule(self) -> str:
        """The method with its threshold, such as "mars 0.9" or "mars gap 0.5 unprotected"."""
        if self.metric is None:
            return self.method
        metric = "" if self.metric == "ratio" else f"{self.metric} "
        return f"mars {metric}{self.value:g}{self.variant}"

    @property
    def variant(self) -> str:
        """What of the server's options is not the default, such as " unprotected"."""
        words = [
            f" {name.removeprefix(OPTION_PREFIX)} {json.dumps(value)}"
            for name, value in further_options(None, self.options).items()
        ]
        return ("" if self.protected is not False else " unprotected") + "".join(words)


@dataclass(frozen=True)
class Settings:
    """What is the same for all cells of a file and would change their numbers.

    Attributes:
        max_tokens: longest answer.
        prompts: number of prompts of each dataset, by dataset.
        seed: of every server, from which requests at temperature > 0 draw.
        server_args: arguments of every server besides those of the method.
        checksums: of each dataset's prompts, by dataset; empty in older files.
    """

    max_tokens: int
    prompts: dict[str, int]
    seed: int
    server_args: tuple[str, ...]
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """One answer.

    Attributes:
        prompt_id: the prompt's id in its dataset.
        prompt_tokens: with the chat template.
        finish_reason: "stop" (the model ended it), "length" (max_tokens reached) or "error".
        seconds, first_token_seconds: from sending the request to the last and the first token.
        start: when it was sent, in seconds after the cell's first request.
        error: what went wrong, "" where nothing did.
    """

    prompt_id: str
    text: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: Literal["stop", "length", "error"]
    seconds: float
    first_token_seconds: float
    start: float
    error: str = ""


@dataclass(frozen=True)
class TaskAnswer:
    """One answer that lm-eval asked for and scored; it tells neither times nor token counts.

    Attributes:
        prompt_id: TASK/NUMBER of the document.
        scores: by lm-eval's name, METRIC,FILTER; more is better.
    """

    prompt_id: str
    text: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Speed:
    """Raw speed of a cell; prefill is included.

    Attributes:
        seconds: from the first request to the last answer's end.
        requests, failed: those with and without an answer.
        prompt_tokens, output_tokens: of all prompts and of all answers.
    """

    seconds: float
    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Acceptance:
    """The server's speculative decoding counters over a cell.

    Attributes:
        drafts: verification steps of single requests.
        draft_tokens, accepted_tokens: those that were verified, and of them those accepted.
        accepted_by_position: accepted tokens at draft position 0, 1, ...; they add up to
            `accepted_tokens`.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Mean acceptance length: tokens per step, the target's own token included."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0


@dataclass(frozen=True)
class OffChoice:
    """A token of an answer that is not the target's first choice.

    At temperature 0 only a lossy rule emits one.

    Attributes:
        position: index of the token in the answer.
        start, end: the characters `text[start:end]` of the answer that it stands for.
        text, logprob: the token, and its log probability under the target.
        best_text, best_logprob: the same of the target's first choice.
    """

    position: int
    start: int
    end: int
    text: str
    logprob: float
    best_text: str
    best_logprob: float

    @property
    def loss(self) -> float:
        """What it lacks in log probability to the first choice, in nats."""
        return self.best_logprob - self.logprob


@dataclass(frozen=True)
class PromptQuality:
    """What one answer is worth.

    Attributes:
        scores: by name; names are explained in docs/sweep.md. A score that does not apply to
            the prompt is not there.
        off_choice: tokens that are not the target's first choice, where they were looked up.
    """

    prompt_id: str
    scores: dict[str, float]
    off_choice: tuple[OffChoice, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """Mean score of a cell beside the autoregressive cell's on the same prompts.

    Intervals are 95 % of a paired bootstrap over prompts.

    Attributes:
        samples: prompts that have the score in both cells.
        value, low, high: mean of this cell.
        reference: mean of the autoregressive cell; None where the score is itself a comparison.
        difference, difference_low, difference_high: this cell minus the autoregressive one.
        recovery, recovery_low, recovery_high: this cell / the autoregressive one; None where the
            latter is 0, or the score is one where less is better.
        margin: loss that still counts as none, in units of the score.
        p_value: one-sided, of "the loss is at least the margin".
        non_inferior: whether p_value is below 0.05; None where it was not tested.
    """

    name: str
    samples: int
    value: float
    low: float
    high: float
    reference: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    recovery: float | None = None
    recovery_low: float | None = None
    recovery_high: float | None = None
    margin: float | None = None
    p_value: float | None = None
    non_inferior: bool | None = None


@dataclass(frozen=True)
class Quality:
    """Quality of a cell's answers.

    Attributes:
        estimates: of the prompts' scores, beside the autoregressive cell where there is one.
        notes: what the reader must know, such as how generated code was confined.
    """

    prompts: tuple[PromptQuality, ...]
    estimates: tuple[Estimate, ...]
    notes: tuple[str, ...] = ()

    def estimate(self, name: str) -> Estimate | None:
        """The estimate of a score, None where it was not measured."""
        return next((item for item in self.estimates if item.name == name), None)


@dataclass(frozen=True)
class Cell:
    """One line of a sweep's file.

    Attributes:
        status: "ok", "failed" (it was tried) or "unavailable" (this vLLM or platform cannot).
        reason: why it is not "ok", else "".
        theta_set_by: "request" where each request carried its threshold, "server" where the server
            was started with it, None where there is none.
        speed: None where the cell is not "ok", or its dataset is a task of lm-eval.
        acceptance: None where the cell is not "ok", or without speculation.
        outputs: the answers in the order of the dataset.
        created: UTC time, ISO 8601.
        git_commit, versions, hardware, command, load_average, weights: as
            `vllm_mars.local.provenance.describe_run`; older files lack the last two, and a cell
            that is not "ok" has no weights.
        server_command, client_command: what was run, the model's path shortened to its name.
        task_answers: the answers of a task of lm-eval, instead of outputs.
        lost_nats: what the answers' relaxed tokens lost against the target's first choices, in
            nats, as a server of "mars" counts it; None where there is no such count.
        node: host that measured it, in older files; no longer written.
        quality: as the file's quality line of the same key has it; None before it was judged.
    """

    key: CellKey
    status: Status
    reason: str
    settings: Settings
    theta_set_by: Literal["request", "server"] | None
    speed: Speed | None
    acceptance: Acceptance | None
    outputs: tuple[Output, ...]
    created: str
    git_commit: str | None
    versions: dict[str, str | None]
    hardware: dict[str, str | int | float | None]
    command: tuple[str, ...]
    server_command: tuple[str, ...] = ()
    client_command: tuple[str, ...] = ()
    task_answers: tuple[TaskAnswer, ...] = ()
    lost_nats: float | None = None
    node: str = ""
    load_average: float | None = None
    weights: dict[str, str | None] = field(default_factory=dict)
    quality: Quality | None = field(default=None, compare=False)

    @property
    def origin(self) -> dict[str, Any]:
        """Where it was measured, for files of what is calculated from it."""
        names = ("created", "git_commit", "versions", "hardware", "load_average", "command")
        return {name: getattr(self, name) for name in (*names, "weights")}

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.speed is not None or bool(self.task_answers)):
            raise ValueError(
                f"status={self.status!r}: a cell has a speed or answers of a task exactly when it "
                "is 'ok'."
            )
        if self.status == "ok" and self.outputs and self.speed is None:
            raise ValueError("outputs: a cell that is 'ok' has a speed beside them.")
        if (self.status == "ok") == bool(self.reason):
            raise ValueError(f"status={self.status!r}: a cell has a reason unless it is 'ok'.")
