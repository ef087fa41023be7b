"""Server options, parsed from vLLM's speculative config and validated."""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm_mars.kernels.rules import PRICE, RULES, Rule
from vllm_mars.options.lock import check_lock

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METHOD = "mars"
# Key of vLLM's `additional_config` that carries the options to the workers.
CONFIG_KEY = METHOD
# Command-line arguments that only vLLM's API server receives, and their keys in `additional_config`
# for callers that create engine arguments without a command line.
SERVER_ARGUMENTS = {
    "tool_call_parser": "mars_tool_call_parser",
    "chat_template": "mars_chat_template",
}
OPTION_PREFIX = "mars_"
# Rejection sampling methods of vLLM that do not preserve the target's distribution.
LOSSY_VLLM_METHODS = ("synthetic", "fly")

# Nats per token; applies if neither a rule nor a bound is given.
DEFAULT_MAX_LOSS = 0.02
# Length of the n-grams whose repetition is never relaxed.
_NGRAM = 4
# Strict tokens at the start of an answer: the default with a price or a bound, and the maximum.
_DEFAULT_OPENING = 8
MOST_OPENING = 1 << 20
# Prices in nats that a bound of 1 nat per token sets: for greedy requests and for fixed drafts at
# temperature 1, and for probabilistic drafts at temperature 1. Fitted to answers of one model, so
# that requests lose about as much as their bound allows (docs/how-it-works.md).
FIXED_PRICE, DRAWN_PRICE = 3.2, 4.5
# Draft temperature as a fraction of the request's. With the default, text at a price is about as
# probable as the target's; acceptance is the same from 0.8 to 0.9. The smallest temperature that
# vLLM accepts above 0 is 0.01, and the smallest fraction of it still counts as sampling.
_DEFAULT_DRAFT_TEMPERATURE = 0.85
_DRAFT_TEMPERATURES = (0.01, 2)
# Nats per token; more would not fit into the integers of a request's record.
MOST_MAX_LOSS = 1024
# Parts of an answer that may be relaxed, in the order of `vllm_mars.worker.records`.
Scope = Literal["all", "thinking", "answer"]
SCOPES: tuple[Scope, ...] = ("all", "thinking", "answer")
# Maximum length of a value in an error, in characters.
_SHOWN = 80
# Metadata of fields that the front end sets, not the user.
_RESOLVED = {"resolved": True}

# Start and end token of a span, as ids or, in the user's options, as text. A span without an end
# token lasts to the end of the request.
Token = int | str
Span = tuple[Token, Token | None]


# One field per rule.
_Values: Any = dataclasses.make_dataclass(
    "_Values", [(name, float | None, None) for name in RULES], frozen=True
)


@dataclass(frozen=True)
class MarsConfig(_Values):
    """Validated options of margin-aware verification.

    `theta` or `price` selects the rule. With neither, `max_loss` sets the price.

    Attributes:
        theta: the paper's rule: accepts a runner-up if z2 > theta * z1. In (0, 1]; 1 is strict, and
            near 0 every runner-up with a positive logit is accepted. In sampled requests it accepts
            runner-ups with certainty, and then gives no guarantee about ends, markers and
            repetitions, unlike a price.
        price: accepts the draft prefix of highest value, with tokens of any rank: each token gained
            is worth this many nats. In [0, 8192]; 0 is strict.
        limit: the largest `max_loss` that a request may choose; None for the server's. Requests
            may always be stricter.
        protected_token_ids: tokens that are served as often as by the target, except by theta in
            sampled requests; None for the model's end-of-sequence and special tokens and, with a
            price or a bound, those that open a comment; () for none.
        strict_spans: pairs of start and end tokens with strict verification between them; None for
            the markers of the server's tool parser, () for none.
        strict_opening: number of tokens that are verified strictly at the start of an answer and
            again after its thinking section. In [0, 2**20]; None for 8 with a price or a bound,
            else 0.
        max_loss: an answer of n tokens loses at most max_loss * (n + 100) nats against the target.
            In [0, 1024]; 0 is strict. None sets no bound, or 0.02 if there is no rule either.
        scope: the part of an answer that may be relaxed: "all" of it, only its "thinking" section,
            or the "answer", which is everything but that section.
        draft_temperature: temperature of probabilistic drafts as a fraction of the request's. In
            [0.01, 2]; 1 is vLLM's behavior, None is 0.85. Strict requests use 1. No value is lossy.
        logprobs: "target" leaves the logprobs of answers unchanged; "sampled" replaces the logprob
            of each sampled token by its log-probability in the served distribution.
        thinking_start: id of the token that begins the thinking section, set by the front end; None
            if there is no such section or only its end is known.
        thinking_end: id of the token that ends the thinking section, set by the front end.
        turns: ids of the tokens that end a message in the server's chat template, set by the front
            end; None if they are unknown.

    Raises:
        ValueError: an option has the wrong type or is out of range, or two rules are given.
    """

    limit: float | None = None
    protected_token_ids: tuple[int, ...] | None = None
    strict_spans: tuple[Span, ...] | None = None
    strict_opening: int | None = None
    max_loss: float | None = None
    scope: Scope = "all"
    draft_temperature: float | None = None
    logprobs: Literal["target", "sampled"] = "target"
    thinking_start: int | None = dataclasses.field(default=None, metadata=_RESOLVED)
    thinking_end: int | None = dataclasses.field(default=None, metadata=_RESOLVED)
    turns: tuple[int, ...] | None = dataclasses.field(default=None, metadata=_RESOLVED)

    def __post_init__(self) -> None:
        self._check_rule()
        if self.max_loss is not None:
            check_max_loss(self.max_loss)
        self._check_limit()
        if self.protected_token_ids is not None:
            object.__setattr__(self, "protected_token_ids", _token_ids(self.protected_token_ids))
        if self.strict_spans is not None:
            object.__setattr__(self, "strict_spans", _spans(self.strict_spans))
        check_scope(self.scope)
        if self.logprobs not in ("target", "sampled"):
            raise ValueError(
                f"mars_logprobs={shown(self.logprobs)} is not one of target, sampled; 'sampled' "
                "makes a sampled token's logprob the one under the served distribution."
            )
        if self.strict_opening is not None:
            meaning = "8 verifies an answer's first 8 tokens strictly, 0 none"
            _require_within(
                "mars_strict_opening", self.strict_opening, MOST_OPENING, meaning, integer=True
            )
        if self.draft_temperature is not None:
            meaning = "1 samples drafts at each request's temperature, as vLLM does"
            least, most = _DRAFT_TEMPERATURES
            _require_within(
                "mars_draft_temperature", self.draft_temperature, most, meaning, least=least
            )

    def _check_rule(self) -> None:
        values = self._rule_values()
        if len(values) > 1:
            named = " and ".join(f"{rule.option}={shown(value)}" for rule, value in values)
            options = ", ".join(rule.option for rule in RULES.values())
            raise ValueError(f"{named} name {len(values)} rules; give one of {options}.")
        if not values and self.max_loss is None:
            object.__setattr__(self, "max_loss", DEFAULT_MAX_LOSS)
        for rule, value in values:
            check_value(rule, value)

    def _check_limit(self) -> None:
        if self.limit is None:
            return
        meaning = "it is the largest mars_max_loss that a request may choose"
        _require_within("mars_limit", self.limit, MOST_MAX_LOSS, meaning)
        if self.max_loss is None:
            raise ValueError(
                f"mars_limit={self.limit} is given, but without mars_max_loss a request may choose "
                "any bound; also give mars_max_loss, or leave it out."
            )
        if self.limit < self.max_loss:
            raise ValueError(
                f"mars_limit={self.limit} is below mars_max_loss={self.max_loss:g}, which each "
                "request may use; leave it out, or lower mars_max_loss."
            )

    def _rule_values(self) -> list[tuple[Rule, float]]:
        values = ((rule, getattr(self, rule.name)) for rule in RULES.values())
        return [(rule, value) for rule, value in values if value is not None]

    @property
    def rule(self) -> Rule:
        """The server's rule; the price if only a bound is given."""
        return next((rule for rule, _ in self._rule_values()), PRICE)

    @property
    def sets_price(self) -> bool:
        """Whether the bound sets the price of requests that give none."""
        return not self._rule_values()

    @property
    def value(self) -> float:
        """Default value of the rule; infinity if `sets_price`."""
        return next((float(value) for _, value in self._rule_values()), math.inf)

    @property
    def most_max_loss(self) -> float:
        """The largest bound that a request may choose, in nats per token."""
        bound = self.max_loss if self.limit is None else self.limit
        return math.inf if bound is None else float(bound)

    @property
    def repeat_ngram(self) -> int:
        """Length of the n-grams whose repetition is never relaxed; 0 for no check."""
        return 0 if self.rule.outright else _NGRAM

    @property
    def opening(self) -> int:
        if self.strict_opening is None:
            return 0 if self.rule.outright and self.max_loss is None else _DEFAULT_OPENING
        return self.strict_opening

    @property
    def draft_share(self) -> float:
        """Draft temperature of lossy requests as a fraction of the request's."""
        share = self.draft_temperature
        return _DEFAULT_DRAFT_TEMPERATURE if share is None else float(share)

    @property
    def lossy(self) -> bool:
        """Whether the output of default requests can differ from vLLM's."""
        return self.value != self.rule.strict and self.max_loss != 0

    @property
    def clients_may_relax(self) -> bool:
        """Whether a request can choose lossy verification."""
        return self.most_max_loss != 0 and self.value != self.rule.strict


def price_of_bound(max_loss: float, temperature: float, is_probabilistic: bool) -> float:
    """Returns the price in nats that a bound in nats per token sets; temperature 0 is greedy."""
    if temperature == 0:
        return FIXED_PRICE * math.sqrt(max_loss)
    return (DRAWN_PRICE if is_probabilistic else FIXED_PRICE) * math.sqrt(max_loss / temperature)


def split_speculative_config(
    speculative_config: Mapping[str, Any],
) -> tuple[MarsConfig | None, dict[str, Any]]:
    """Splits vLLM's speculative config into validated options and the config for vLLM.

    The options are None unless "mars" is the rejection sample method, which becomes "standard" for
    vLLM. Dashes in keys count as underscores, as in vLLM.

    Raises:
        ValueError: a bad option, an unknown `mars_*` key, or `mars_*` keys without the method.
    """
    config = {key.replace("-", "_"): value for key, value in speculative_config.items()}
    options = {key: config.pop(key) for key in list(config) if key.startswith(OPTION_PREFIX)}
    method = config.get("rejection_sample_method", "standard")
    if method != METHOD:
        if options:
            listed = ", ".join(f"{_name(key)}={shown(value)}" for key, value in options.items())
            raise ValueError(
                f"{listed} is given, but rejection_sample_method is {method!r}; "
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
    config["rejection_sample_method"] = "standard"
    return MarsConfig(**{names[key]: value for key, value in options.items()}), config


def config_of(vllm_config: "VllmConfig") -> MarsConfig | None:
    """Returns the options in vLLM's config, or None if MARS is off."""
    additional = vllm_config.additional_config
    carrier = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    config: MarsConfig | None = getattr(carrier, "config", None)
    if config is not None:
        # The lock may be set only on the worker's node.
        check_lock(lossy_reason(config, METHOD))
    return config


def unknown_option(key: str, whose: str, names: Sequence[str]) -> ValueError:
    """Returns the error for an unknown key, with the closest known one."""
    name = _name(key)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
    return ValueError(
        f"{name} is not an option of {whose}; did you mean {nearest}? The options are "
        f"{', '.join(names)}."
    )


def check_value(rule: Rule, value: object, name: str | None = None) -> None:
    """Raises ValueError if a value is outside the rule's range; `name` defaults to the option."""
    meaning = f"{rule.strict:g} switches the relaxation off"
    _require_within(name or rule.option, value, rule.most, meaning, above_0=rule.strict != 0)


def check_max_loss(nats: object) -> None:
    meaning = "0 is strict, 0.02 lets an answer lose 0.02 nats for each of its tokens"
    _require_within("mars_max_loss", nats, MOST_MAX_LOSS, meaning)


def check_scope(scope: object) -> None:
    if scope not in SCOPES:
        raise ValueError(
            f"mars_scope={shown(scope)} is not one of {', '.join(SCOPES)}; 'thinking' keeps all "
            "but the thinking section strict, 'answer' that section."
        )


def lossy_reason(config: MarsConfig | None, method: str) -> str | None:
    """Returns the lossy setting of a server in words, or None if it is lossless."""
    if config is None:
        if method in LOSSY_VLLM_METHODS:
            return f"rejection_sample_method={method!r} is lossy"
        return None
    if not config.lossy:
        return None
    if config.sets_price:
        return f"mars_max_loss={config.max_loss}"
    return f"{config.rule.option}={config.value:g}"


def shown(value: object) -> str:
    """Formats a value for an error, shortened if it is long."""
    return _cut(repr(value))


def _name(key: str) -> str:
    return _cut(repr(key)[1:-1])


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _require_within(
    name: str,
    value: object,
    most: float,
    meaning: str,
    *,
    least: float = 0,
    above_0: bool = False,
    integer: bool = False,
) -> None:
    """Raises unless a value is a number in [least, most], or (0, most] if `above_0`."""
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        kind = "an integer" if integer else "a number"
        raise ValueError(
            f"{name}={shown(value)} is a {type(value).__name__}, but must be {kind}; {meaning}."
        )
    if not least <= value <= most or (above_0 and value == 0):
        start = "(" if above_0 else "["
        raise ValueError(f"{name}={shown(value)} is outside {start}{least}, {most}]; {meaning}.")


def _is_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def _token_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or not all(map(_is_id, ids)):
        raise ValueError(
            f"mars_protected_token_ids={shown(ids)} is not a list of token ids (integers >= 0); "
            "[] switches the protection off."
        )
    return tuple(ids)


def _spans(spans: object) -> tuple[Span, ...]:
    def is_token(token: object) -> bool:
        return _is_id(token) or (isinstance(token, str) and token != "")

    def is_span(span: object) -> bool:
        return (
            isinstance(span, list | tuple)
            and len(span) == 2
            and is_token(span[0])
            and (span[1] is None or is_token(span[1]))
        )

    if not isinstance(spans, list | tuple) or not all(map(is_span, spans)):
        raise ValueError(
            f"mars_strict_spans={shown(spans)} is not a list of pairs of a start and an end token "
            '(text or id; null for an end that never comes), such as [["<tool_call>", '
            '"</tool_call>"]]; [] switches it off.'
        )
    return tuple(tuple(span) for span in spans)
