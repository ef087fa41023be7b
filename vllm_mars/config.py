"""The user's options: read from vLLM's speculative config, validated, carried to the workers."""

import dataclasses
import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vllm_mars.lock import check_lock

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METHOD = "mars"
# The key in vLLM's `additional_config` under which the options travel to the workers.
CONFIG_KEY = METHOD
# The key there under which whoever makes vLLM's engine arguments without its command line names the
# server's tool parser.
TOOL_PARSER_KEY = "mars_tool_call_parser"
OPTION_PREFIX = "mars_"
# Methods of vLLM itself that do not keep the target's distribution.
LOSSY_VLLM_METHODS = ("synthetic", "fly")

# The metrics, and the name of what each compares with: an option, and a field of `Threshold`.
METRICS = {"ratio": "theta", "gap": "gap", "price": "price"}
# Those options as a user writes them.
OPTION = {metric: OPTION_PREFIX + name for metric, name in METRICS.items()}
# The option that limits what a request may choose by each metric, and as a user writes it.
_LIMITS = {"ratio": "theta_min", "gap": "gap_max", "price": "price_max"}
LIMIT = {metric: OPTION_PREFIX + name for metric, name in _LIMITS.items()}
# The option that lists what shadow mode counts by each metric.
_SHADOW = {metric: f"shadow_{name}s" for metric, name in METRICS.items()}
# Lengths of an n-gram that the guard against repetition can look for, and which one by default.
_NGRAMS = range(2, 17)
_DEFAULT_NGRAM = 4
# In nats: what one token can lose at most, and 2**30 of the kernels' units.
MOST_BURST = 16384
# A field that the front end fills in, not the user.
_RESOLVED = {"resolved": True}

# A start and an end token: ids, or, as a user may write them, their text. Without an end the span
# lasts to the end of the request.
Token = int | str
Span = tuple[Token, Token | None]


# What to write where a metric's own option is missing.
_NEEDED = {
    "gap": "(nats, >= 0), e.g. 0.5: runner-ups above exp(-0.5) = 0.61 times the first choice's "
    "probability are accepted.",
    "price": "(nats per token gained, >= 0), e.g. 0.25: drafts are kept as long as the tokens that "
    "they bring cost no more than that each.",
}


class Threshold(NamedTuple):
    """From where on a draft token is accepted that is not the first choice.

    A runner-up is where `z2 > theta * z1 - gap`; with a price a prefix is, for what it is worth.

    Attributes:
        theta: in (0, 1]; 1 relaxes nothing.
        gap: in nats, >= 0; 0 relaxes nothing.
        price: in nats per token gained, >= 0; 0 relaxes nothing.
    """

    theta: float = 1.0
    gap: float = 0.0
    price: float = 0.0

    @classmethod
    def of(cls, metric: str, value: float) -> "Threshold":
        """The threshold of one metric, which relaxes nothing by another."""
        return cls(**{METRICS[metric]: float(value)})

    def value(self, metric: str) -> float:
        """The value that the metric compares with."""
        value: float = getattr(self, METRICS[metric])
        return value


STRICT = Threshold()
# As a limit of what requests may choose: anything.
LOOSEST = Threshold(theta=0.0, gap=MOST_BURST, price=MOST_BURST)


@dataclass(frozen=True)
class MarsConfig:
    """Validated options of margin-aware verification.

    Attributes:
        theta: a runner-up is accepted where z2/z1 is above it; in (0, 1]. 1 switches the relaxation
            off, near 0 every runner-up with a positive logit is accepted.
        metric: "ratio" (the paper's z2 > theta * z1), "gap" (z2 > z1 - gap, shift-invariant), or
            "price" (the prefix that is worth most, over tokens of any rank).
        gap: tolerance of metric "gap" in nats, >= 0; the runner-up's probability is then above
            exp(-gap) times the first choice's. 0 with another metric.
        price: of metric "price", nats that a draft token gained may cost, >= 0; 0 with another
            metric.
        protected_token_ids: tokens at which verification stays strict; None means the
            end-of-sequence and special tokens of the model, () none.
        client_control: whether a request may choose its own theta (or gap, or price), a smaller
            `max_loss`, or no drafts.
        theta_min: lower limit of a request's own theta, in [0, 1]; None for the server's `theta`,
            so that a request may be stricter than the server, not looser; 0 sets no limit. It does
            not bind the server's own `theta`.
        gap_max: upper limit of a request's own gap in nats, >= 0; None for the server's `gap`.
        price_max: the same of a price.
        structured: "strict" verifies requests with structured output strictly, "relaxed" treats
            them like all others (the grammar's mask holds either way).
        strict_spans: pairs of tokens between which verification is strict; None means the markers
            of the server's tool parser, () none.
        repeat_guard: n, in [2, 16]: no token is relaxed that completes an n-gram which the answer
            already holds; 0 for no guard, None for 4 with metric "price" and 0 with the others.
        scope: "all", or "reasoning" to relax only inside the model's thinking section.
        max_relaxed_share: largest share of a request's output tokens that may be relaxed, in
            [0, 1].
        max_loss: the most that the relaxed tokens of a request may lose against the target's first
            choices, in nats per output token, >= 0; None sets no bound.
        loss_burst: nats that a request may lose beyond that, in [0, 16384].
        shadow: verify strictly, and count what each of `shadow_thetas` (or `shadow_gaps`,
            `shadow_prices`, by the metric) would have accepted.
        shadow_thetas: thresholds to count, each in (0, 1], in any order.
        shadow_gaps: the same of metric "gap", in nats, each >= 0.
        shadow_prices: the same of metric "price", in nats per token gained, each >= 0.
        thinking: ids of the tokens that begin and end the thinking section; filled in by the front
            end where `scope` asks for it.

    Raises:
        ValueError: an option is of the wrong type, out of range, or does not go with the metric.
    """

    theta: float = 0.9
    metric: Literal["ratio", "gap", "price"] = "ratio"
    gap: float = 0.0
    price: float = 0.0
    protected_token_ids: tuple[int, ...] | None = None
    client_control: bool = True
    theta_min: float | None = None
    gap_max: float | None = None
    price_max: float | None = None
    structured: Literal["strict", "relaxed"] = "strict"
    strict_spans: tuple[Span, ...] | None = None
    repeat_guard: int | None = None
    scope: Literal["all", "reasoning"] = "all"
    max_relaxed_share: float = 1.0
    max_loss: float | None = None
    loss_burst: float = 1.0
    shadow: bool = False
    shadow_thetas: tuple[float, ...] = (0.84, 0.88, 0.9, 0.92, 0.96)
    shadow_gaps: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    shadow_prices: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    thinking: tuple[int, int] | None = dataclasses.field(default=None, metadata=_RESOLVED)

    def __post_init__(self) -> None:
        _require_choice(
            "mars_metric",
            self.metric,
            tuple(METRICS),
            "'ratio' is the paper's z2 > theta * z1, 'gap' is z2 > z1 - gap, 'price' weighs a "
            "prefix of the draft against its loss",
        )
        check_theta(self.theta)
        for metric in ("gap", "price"):
            value = getattr(self, metric)
            check_nats(value, OPTION[metric])
            if self.metric != metric and value != 0:
                raise ValueError(
                    f"mars_{metric}={value} belongs to metric {metric!r}; add "
                    f"mars_metric={metric!r} or drop it."
                )
        if self.protected_token_ids is not None:
            object.__setattr__(self, "protected_token_ids", _token_ids(self.protected_token_ids))
        meaning = "false refuses requests that choose their own theta"
        _require_boolean("mars_client_control", self.client_control, meaning)
        self._check_limits()
        meaning = "'strict' never relaxes a request with structured output"
        _require_choice("mars_structured", self.structured, ("strict", "relaxed"), meaning)
        if self.strict_spans is not None:
            object.__setattr__(self, "strict_spans", _spans(self.strict_spans))
        meaning = "'reasoning' relaxes only inside the model's thinking section"
        _require_choice("mars_scope", self.scope, ("all", "reasoning"), meaning)
        if self.thinking is not None:
            object.__setattr__(self, "thinking", tuple(self.thinking))
        meaning = "1 sets no limit, 0.1 lets a tenth of a request's tokens be relaxed"
        _require_within("mars_max_relaxed_share", self.max_relaxed_share, 1, meaning)
        if self.max_loss is not None:
            check_max_loss(self.max_loss)
        meaning = "1 lets an answer lose one nat beyond mars_max_loss for each of its tokens"
        _require_within("mars_loss_burst", self.loss_burst, MOST_BURST, meaning)
        self._check_repeat_guard()
        meaning = "true verifies strictly and counts what other thresholds would have accepted"
        _require_boolean("mars_shadow", self.shadow, meaning)
        for metric, name in _SHADOW.items():
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(
                    f"mars_{name}={values!r} is not a list of numbers, such as "
                    f"{list(getattr(MarsConfig, name))}."
                )
            for value in values:
                check_threshold(metric, value, OPTION_PREFIX + name)
            object.__setattr__(self, name, tuple(sorted(set(map(float, values)))))

    def _check_limits(self) -> None:
        for metric, option in LIMIT.items():
            limit = getattr(self, option.removeprefix(OPTION_PREFIX))
            if limit is None:
                continue
            if metric == "ratio":
                meaning = "0 sets no limit, 1 lets requests only switch the relaxation off"
                _require_within(option, limit, 1, meaning)
            else:
                meaning = "leave it out and requests may only be stricter than the server"
                _require_within(option, limit, math.inf, meaning)
            if metric != self.metric:
                raise ValueError(
                    f"{option}={limit} belongs to metric {metric!r}, but mars_metric is "
                    f"{self.metric!r}; set {LIMIT[self.metric]} instead or drop it."
                )

    def _check_repeat_guard(self) -> None:
        ngram = self.repeat_guard
        if ngram is None:
            return
        if isinstance(ngram, bool) or not isinstance(ngram, int):
            raise ValueError(
                f"mars_repeat_guard={ngram!r} is a {type(ngram).__name__}, but must be an integer; "
                "give 4, or 0 to switch the guard off."
            )
        if ngram != 0 and ngram not in _NGRAMS:
            raise ValueError(
                f"mars_repeat_guard={ngram} is neither 0 nor in [{_NGRAMS[0]}, {_NGRAMS[-1]}]; 4 "
                "relaxes no token that repeats four tokens of the answer, 0 switches the guard off."
            )

    @property
    def shadowed(self) -> tuple[float, ...]:
        """What shadow mode counts, by this server's metric; nothing outside that mode."""
        values: tuple[float, ...] = getattr(self, _SHADOW[self.metric]) if self.shadow else ()
        return values

    @property
    def threshold(self) -> Threshold:
        """That of a request which chooses nothing."""
        return Threshold.of(self.metric, getattr(self, METRICS[self.metric]))

    @property
    def limit(self) -> float:
        """How far a request's own threshold may go, by this server's metric."""
        limit: float | None = getattr(self, _LIMITS[self.metric])
        return self.threshold.value(self.metric) if limit is None else limit

    @property
    def repeat_ngram(self) -> int:
        """Tokens of an n-gram that no relaxed token may complete again; 0 for no guard."""
        if self.repeat_guard is None:
            return _DEFAULT_NGRAM if self.metric == "price" else 0
        return self.repeat_guard

    @property
    def limits_share(self) -> bool:
        """Whether `max_relaxed_share` limits anything; in shadow mode nothing is relaxed."""
        return self.max_relaxed_share < 1 and not self.shadow

    @property
    def lossy(self) -> bool:
        """Whether the output can differ from vLLM's own for a request that chooses nothing."""
        return self.threshold != STRICT and not self.shadow and self.max_relaxed_share > 0

    @property
    def clients_may_relax(self) -> bool:
        """Whether a request can choose lossy verification for itself."""
        may = self.client_control and not self.shadow and self.max_relaxed_share > 0
        return may and self.limit != STRICT.value(self.metric)

    def to_json(self) -> dict[str, Any]:
        """The options as plain JSON, for vLLM's `additional_config`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> "MarsConfig":
        """The inverse of `to_json`; runs the same checks."""
        return cls(**options)


def split_speculative_config(
    speculative_config: Mapping[str, Any],
) -> tuple[MarsConfig | None, dict[str, Any]]:
    """Takes this project's options out of vLLM's speculative config.

    Args:
        speculative_config: the user's dict; dashes in keys count as underscores, as in vLLM. It is
            not changed.

    Returns:
        The validated options, or None where "mars" is not the rejection sample method, and the dict
        for vLLM, in which the method is then "standard".

    Raises:
        ValueError: a bad option, an unknown `mars_*` key, or `mars_*` keys without the method.
    """
    config = {key.replace("-", "_"): value for key, value in speculative_config.items()}
    options = {key: config.pop(key) for key in list(config) if key.startswith(OPTION_PREFIX)}
    method = config.get("rejection_sample_method", "standard")
    if method != METHOD:
        if options:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise ValueError(
                f"{given} is given, but rejection_sample_method is {method!r}; "
                f"set it to {METHOD!r} or drop the option."
            )
        return None, config

    names = {
        OPTION_PREFIX + field.name: field.name
        for field in dataclasses.fields(MarsConfig)
        if field.metadata != _RESOLVED
    }
    for key in options:
        if key not in names:
            raise unknown_option(key, "margin-aware verification", list(names))
    # Only here is it known what the user wrote and what is a default.
    metric = options.get("mars_metric", "ratio")
    for other, name in _SHADOW.items():
        key = OPTION_PREFIX + name
        if key in options and not options.get("mars_shadow"):
            raise ValueError(
                f"{key}={options[key]!r} belongs to the shadow mode; add mars_shadow=true or drop "
                "it."
            )
        if key in options and metric in METRICS and metric != other:
            raise ValueError(
                f"{key}={options[key]!r} belongs to metric {other!r}, but mars_metric is "
                f"{metric!r}; set mars_{_SHADOW[metric]} instead or drop it."
            )
    if metric in _NEEDED:
        if "mars_theta" in options:
            raise ValueError(
                f"mars_theta={options['mars_theta']!r} belongs to metric 'ratio', but mars_metric "
                f"is {metric!r}; drop one of them."
            )
        if OPTION[metric] not in options and not options.get("mars_shadow"):
            raise ValueError(f"mars_metric={metric!r} needs mars_{metric} {_NEEDED[metric]}")
    config["rejection_sample_method"] = "standard"
    return MarsConfig(**{names[key]: value for key, value in options.items()}), config


# What `config_of` read last, and what it says: read once, not for every request.
_last_read: tuple[object, MarsConfig] | None = None


def config_of(vllm_config: "VllmConfig") -> MarsConfig | None:
    """The options that travelled with vLLM's config, or None where MARS is not asked for.

    Raises:
        ValueError: the options are bad, or the lock's variable has an unknown value.
        RuntimeError: this machine is locked to strict verification, and the options are lossy.
    """
    global _last_read
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return None
    options, last_read = additional[CONFIG_KEY], _last_read
    if last_read is None or last_read[0] is not options:
        _last_read = last_read = options, MarsConfig.from_json(options)
    config = last_read[1]
    # The lock may be set on the worker's node alone.
    check_lock(lossy_reason(config, METHOD))
    return config


def unknown_option(key: str, whose: str, names: Sequence[str]) -> ValueError:
    """The error for a key that does not exist, with the nearest one that does."""
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0)
    return ValueError(
        f"{key} is not an option of {whose}; did you mean {nearest[0]}? The options are "
        f"{', '.join(names)}."
    )


def check_theta(theta: object, name: str = "mars_theta") -> None:
    """Raises ValueError unless theta is a number in (0, 1]."""
    _require_within(name, theta, 1, "1 switches the relaxation off", above_0=True)


def check_threshold(metric: str, value: object, name: str | None = None) -> None:
    """Raises ValueError unless the value is one that the metric can compare with.

    Args:
        metric: "ratio", "gap" or "price".
        value: to check.
        name: how the error names it; the option by default.
    """
    (check_theta if metric == "ratio" else check_nats)(value, name or OPTION[metric])


def check_nats(nats: object, name: str = "mars_gap") -> None:
    """Raises ValueError unless a gap or a price is a finite number >= 0."""
    _require_within(name, nats, math.inf, "0 switches the relaxation off")


def check_max_loss(nats: object) -> None:
    """Raises ValueError unless a bound on the loss is a finite number >= 0."""
    meaning = (
        "leave it out to set no bound, 0.02 lets an answer lose 0.02 nats for each of its tokens"
    )
    _require_within("mars_max_loss", nats, math.inf, meaning)


def lossy_reason(config: MarsConfig | None, method: str) -> str | None:
    """Says in words why a server with these options is lossy, or None if it is not."""
    if config is None:
        if method in LOSSY_VLLM_METHODS:
            return f"rejection_sample_method={method!r} is lossy"
        return None
    if not config.lossy:
        return None
    name = METRICS[config.metric]
    return f"{OPTION_PREFIX}{name}={getattr(config, name)}"


def _require_within(
    name: str, value: object, most: float, meaning: str, *, above_0: bool = False
) -> None:
    """Raises ValueError unless a value is a finite number in [0, most], or in (0, most]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{name}={value!r} is a {type(value).__name__}, but must be a number; {meaning}."
        )
    if not 0 <= value <= min(most, sys.float_info.max) or (above_0 and value == 0):
        start, end = "(" if above_0 else "[", ")" if most == math.inf else "]"
        raise ValueError(f"{name}={value} is outside {start}0, {most}{end}; {meaning}.")


def _require_choice(name: str, value: object, choices: tuple[str, ...], meaning: str) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}; {meaning}.")


def _require_boolean(name: str, value: object, meaning: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not true or false; {meaning}.")


def _token_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or any(
        isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids
    ):
        raise ValueError(
            f"mars_protected_token_ids={ids!r} is not a list of token ids (integers >= 0); "
            "[] switches the protection off."
        )
    return tuple(ids)


def _spans(spans: object) -> tuple[Span, ...]:
    def is_token(token: object) -> bool:
        is_id = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        return is_id or (isinstance(token, str) and token != "")

    def is_span(span: object) -> bool:
        return (
            isinstance(span, list | tuple)
            and len(span) == 2
            and is_token(span[0])
            and (span[1] is None or is_token(span[1]))
        )

    if not isinstance(spans, list | tuple) or not all(map(is_span, spans)):
        raise ValueError(
            f"mars_strict_spans={spans!r} is not a list of pairs of a start and an end token "
            '(text or id; null for an end that never comes), such as [["<tool_call>", '
            '"</tool_call>"]]; [] switches it off.'
        )
    return tuple(tuple(span) for span in spans)
