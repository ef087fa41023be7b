"""The user's options: read from vLLM's speculative config, validated, carried to the workers."""

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
# The key in vLLM's `additional_config` under which the options travel to the workers.
CONFIG_KEY = METHOD
# Arguments of vLLM's command line that its API server alone knows, and the keys there under which
# whoever makes engine arguments without a command line names them.
SERVER_ARGUMENTS = {
    "tool_call_parser": "mars_tool_call_parser",
    "chat_template": "mars_chat_template",
}
OPTION_PREFIX = "mars_"
# Methods of vLLM itself that do not keep the target's distribution.
LOSSY_VLLM_METHODS = ("synthetic", "fly")

# In nats per token, where neither a rule nor a bound is named.
DEFAULT_MAX_LOSS = 0.02
# Tokens of an n-gram that the guard against repetition looks for.
_NGRAM = 4
# Strict tokens at an answer's begin by default with a price or a bound, and the most.
_DEFAULT_OPENING = 8
MOST_OPENING = 1 << 20
# The price in nats that a bound of 1 nat per token sets for greedy requests and, at temperature 1,
# with fixed and with drawn drafts: found on answers of one model, so that requests spend about what
# their bound says (docs/how-it-works.md).
FIXED_PRICE, DRAWN_PRICE = 3.2, 4.5
# Shares of a request's temperature. By the default a price leaves the text about as probable as the
# target's own; between 0.8 and 0.9 as much is accepted. vLLM takes no temperature between 0 and
# 0.01, and what is left of that by the least share still counts as sampling.
_DEFAULT_DRAFT_TEMPERATURE = 0.85
_DRAFT_TEMPERATURES = (0.01, 2)
# What the integers of a record hold, in nats per token.
MOST_MAX_LOSS = 1024
# What of an answer may be relaxed; `vllm_mars.worker.records` numbers them in this order.
Scope = Literal["all", "thinking", "answer"]
SCOPES: tuple[Scope, ...] = ("all", "thinking", "answer")
# Characters of a value that an error repeats.
_SHOWN = 80
# A field that the front end fills in, not the user.
_RESOLVED = {"resolved": True}

# A start and an end token: ids, or, as a user may write them, their text. Without an end the span
# lasts to the end of the request.
Token = int | str
Span = tuple[Token, Token | None]


# A field for each rule.
_Values: Any = dataclasses.make_dataclass(
    "_Values", [(name, float | None, None) for name in RULES], frozen=True
)


@dataclass(frozen=True)
class MarsConfig(_Values):
    """Validated options of margin-aware verification.

    One of `theta` and `price` names the rule. Without either, `max_loss` sets the price.

    Attributes:
        theta: the paper's rule: a runner-up is accepted where z2 > theta * z1. In (0, 1]; 1 is
            strict, near 0 every runner-up with a positive logit is accepted. Where a request
            samples it accepts them outright, whatever else the target gives weight: it keeps no
            promise about ends, markers and repetitions then, which a price does.
        price: the prefix of the draft is accepted, tokens of any rank among it, that is worth most:
            each token gained may cost so many nats. In [0, 8192]; 0 is strict.
        limit: the largest `max_loss` that a request may ask for; None for the server's own. A
            request may always be stricter.
        protected_token_ids: tokens that are served as often as the target would, but by theta
            where a request samples; None means the end-of-sequence and special tokens of the
            model, () none.
        strict_spans: pairs of tokens between which verification is strict; None means the markers
            of the server's tool parser, () none.
        strict_opening: so many tokens of an answer are verified strictly first, and again behind
            its thinking section; in [0, 2**20], None for 8 with a price or a bound, else 0.
        max_loss: an answer of n tokens loses at most max_loss * (n + 100) nats against the target;
            in [0, 1024]. 0 is strict, None sets no bound, and means 0.02 without a rule.
        scope: what of an answer may be relaxed: "all" of it, its "thinking" section alone, or the
            "answer" alone, which is all but that section.
        draft_temperature: what drawn drafts are drawn at, as a share of the request's temperature,
            in [0.01, 2]; 1 is vLLM's own, None is 0.85. Those of strict requests are drawn at 1.
            Not lossy, whatever it is.
        logprobs: "target" leaves the logprobs of answers as they are; "sampled" makes that of each
            token which a request sampled the one under what was served.
        thinking_start: id of the token that begins the thinking section; filled in by the front
            end. There is none without an end.
        thinking_end: id of the token that ends it, likewise.
        turns: ids of the tokens by which the server's chat template ends a message, likewise; None
            where they are not known.

    Raises:
        ValueError: an option is of the wrong type or out of range, or two rules are named.
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
                "makes a sampled token's logprob the one under what was served."
            )
        if self.strict_opening is not None:
            meaning = "8 verifies an answer's first 8 tokens strictly, 0 none"
            _require_integer("mars_strict_opening", self.strict_opening, meaning)
            _require_within("mars_strict_opening", self.strict_opening, MOST_OPENING, meaning)
        if self.draft_temperature is not None:
            meaning = "1 draws drafts at each request's own temperature, as vLLM does"
            least, most = _DRAFT_TEMPERATURES
            _require_within(
                "mars_draft_temperature", self.draft_temperature, most, meaning, least=least
            )

    def _check_rule(self) -> None:
        given = self._given()
        if len(given) > 1:
            named = " and ".join(f"{rule.option}={shown(value)}" for rule, value in given)
            options = ", ".join(rule.option for rule in RULES.values())
            raise ValueError(f"{named} name {len(given)} rules; give one of {options}.")
        if not given and self.max_loss is None:
            object.__setattr__(self, "max_loss", DEFAULT_MAX_LOSS)
        for rule, value in given:
            check_value(rule, value)

    def _check_limit(self) -> None:
        if self.limit is None:
            return
        meaning = "it is the largest mars_max_loss that a request may ask for"
        _require_within("mars_limit", self.limit, MOST_MAX_LOSS, meaning)
        if self.max_loss is None:
            raise ValueError(
                f"mars_limit={self.limit} is given, but without a mars_max_loss of this server "
                "requests may ask for any; name a mars_max_loss, too, or leave it out."
            )
        if self.limit < self.max_loss:
            raise ValueError(
                f"mars_limit={self.limit} is stricter than this server's own "
                f"mars_max_loss={self.max_loss:g}, but requests may ask for all that is as strict "
                "as their server; leave it out, or have the server itself stricter (mars_max_loss)."
            )

    def _given(self) -> list[tuple[Rule, float]]:
        """The rules that are named, and their values."""
        values = ((rule, getattr(self, rule.name)) for rule in RULES.values())
        return [(rule, value) for rule, value in values if value is not None]

    @property
    def rule(self) -> Rule:
        """The rule of this server."""
        return next((rule for rule, _ in self._given()), PRICE)

    @property
    def sets_price(self) -> bool:
        """Whether the bound sets the price of a request that names none."""
        return not self._given()

    @property
    def value(self) -> float:
        """The rule's value for a request that chooses nothing; infinity for `sets_price`."""
        return next((float(value) for _, value in self._given()), math.inf)

    @property
    def most_max_loss(self) -> float:
        """The largest bound that a request may ask for, and the most that any answer may lose."""
        given = self.max_loss if self.limit is None else self.limit
        return math.inf if given is None else float(given)

    @property
    def repeat_ngram(self) -> int:
        """Tokens of an n-gram that the guard against repetition looks for; 0 for no guard."""
        return 0 if self.rule.outright else _NGRAM

    @property
    def opening(self) -> int:
        """Tokens that are verified strictly first."""
        if self.strict_opening is None:
            return 0 if self.rule.outright and self.max_loss is None else _DEFAULT_OPENING
        return self.strict_opening

    @property
    def draft_share(self) -> float:
        """The share of its temperature that drafts of a lossy request are drawn at."""
        given = self.draft_temperature
        return _DEFAULT_DRAFT_TEMPERATURE if given is None else float(given)

    @property
    def lossy(self) -> bool:
        """Whether the output can differ from vLLM's own for a request that chooses nothing."""
        return self.value != self.rule.strict and self.max_loss != 0

    @property
    def clients_may_relax(self) -> bool:
        """Whether a request can choose lossy verification for itself."""
        return self.most_max_loss != 0 and self.value != self.rule.strict

    def to_json(self) -> dict[str, Any]:
        """The options as plain JSON, of which `MarsConfig(**options)` makes them again."""
        return dataclasses.asdict(self)


def price_of_bound(max_loss: float, temperature: float, is_probabilistic: bool) -> float:
    """The price in nats that a bound sets for a request.

    Args:
        max_loss: the bound in nats per token, >= 0.
        temperature: of the request, >= 0; 0 is greedy.
        is_probabilistic: whether drafts are drawn where requests sample.
    """
    if temperature == 0:
        return FIXED_PRICE * math.sqrt(max_loss)
    return (DRAWN_PRICE if is_probabilistic else FIXED_PRICE) * math.sqrt(max_loss / temperature)


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
            given = ", ".join(f"{_name(key)}={shown(value)}" for key, value in options.items())
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
    config["rejection_sample_method"] = "standard"
    return MarsConfig(**{names[key]: value for key, value in options.items()}), config


def config_of(vllm_config: "VllmConfig") -> MarsConfig | None:
    """The options that travelled with vLLM's config, or None where MARS is not asked for.

    Raises:
        ValueError: the lock's variable has an unknown value.
        RuntimeError: this machine is locked to strict verification, and the options are lossy.
    """
    additional = vllm_config.additional_config
    carrier = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    config: MarsConfig | None = getattr(carrier, "config", None)
    if config is not None:
        # The lock may be set on the worker's node alone.
        check_lock(lossy_reason(config, METHOD))
    return config


def unknown_option(key: str, whose: str, names: Sequence[str]) -> ValueError:
    """The error for a key that does not exist, with the nearest one that does."""
    name = _name(key)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
    return ValueError(
        f"{name} is not an option of {whose}; did you mean {nearest}? The options are "
        f"{', '.join(names)}."
    )


def check_value(rule: Rule, value: object, name: str | None = None) -> None:
    """Raises ValueError unless the value is one of the rule's.

    Args:
        rule: whose value it is.
        value: to check.
        name: how the error names it; the option by default.
    """
    meaning = f"{rule.strict:g} switches the relaxation off"
    _require_within(name or rule.option, value, rule.most, meaning, above_0=rule.strict != 0)


def check_max_loss(nats: object) -> None:
    """Raises ValueError unless a bound on the loss is a number in [0, 1024]."""
    meaning = "0 is strict, 0.02 lets an answer lose 0.02 nats for each of its tokens"
    _require_within("mars_max_loss", nats, MOST_MAX_LOSS, meaning)


def check_scope(scope: object) -> None:
    """Raises ValueError unless it is one of `SCOPES`."""
    if scope not in SCOPES:
        raise ValueError(
            f"mars_scope={shown(scope)} is not one of {', '.join(SCOPES)}; 'thinking' keeps all "
            "but the thinking section strict, 'answer' that section."
        )


def lossy_reason(config: MarsConfig | None, method: str) -> str | None:
    """Says in words why a server with these options is lossy, or None if it is not."""
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
    """A value as an error repeats it: the whole of a short one."""
    return _cut(repr(value))


def _name(key: str) -> str:
    """The same of an option's name."""
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
) -> None:
    """Raises ValueError unless a value is a number in [least, most], or in (0, most]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{name}={shown(value)} is a {type(value).__name__}, but must be a number; {meaning}."
        )
    if not least <= value <= most or (above_0 and value == 0):
        start = "(" if above_0 else "["
        raise ValueError(f"{name}={shown(value)} is outside {start}{least}, {most}]; {meaning}.")


def _require_integer(name: str, value: object, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"{name}={shown(value)} is a {type(value).__name__}, but must be an integer; {meaning}."
        )


def _token_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or any(
        isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids
    ):
        raise ValueError(
            f"mars_protected_token_ids={shown(ids)} is not a list of token ids (integers >= 0); "
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
            f"mars_strict_spans={shown(spans)} is not a list of pairs of a start and an end token "
            '(text or id; null for an end that never comes), such as [["<tool_call>", '
            '"</tool_call>"]]; [] switches it off.'
        )
    return tuple(tuple(span) for span in spans)
