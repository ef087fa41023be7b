"""Token ids of the markers of strict spans and of the thinking section, found in the front end.

A user may give a marker as text, or leave it to the server's tool or reasoning parser. The workers,
which scan the answers (`vllm_mars.kernels.constraints.markers`), only know ids.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_mars.kernels.constraints.markers import MAX_SPANS
from vllm_mars.options.config import SERVER_ARGUMENTS, MarsConfig, Span, Token, shown
from vllm_mars.options.prompts import turns_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger(f"vllm.{__name__}")


def resolve_markers(
    config: MarsConfig, engine_args: Any, model_config: "ModelConfig"
) -> MarsConfig:
    """Replaces markers given as text by ids and fills in the defaults."""
    if config.strict_spans is None:
        name = _argument(engine_args, "tool_call_parser")
        spans = _spans_of_tool_parser(name, model_config) if name else ()
    else:
        spans = _span_ids(config.strict_spans, model_config)
    start, end = _thinking(config, engine_args, model_config)
    if config.scope != "all" and start is None:
        raise ValueError(
            f"mars_scope={config.scope!r} needs the markers of the thinking section, each one "
            "token of this model, but this server does not know them; name --reasoning-parser or "
            "--reasoning-config, or leave mars_scope out."
        )
    config = replace(config, strict_spans=spans, thinking_start=start, thinking_end=end)
    template = _argument(engine_args, "chat_template")
    return replace(config, turns=turns_of(config, template, model_config))


def remember_arguments(engine_args: Any, arguments: Any) -> None:
    """Copies `SERVER_ARGUMENTS`, which vLLM only passes to its API server, to `EngineArgs`."""
    for name, key in SERVER_ARGUMENTS.items():
        if (value := getattr(arguments, name, None)) is not None:
            setattr(engine_args, f"_{key}", value)


def _argument(engine_args: Any, name: str) -> Any:
    key = SERVER_ARGUMENTS[name]
    return getattr(engine_args, f"_{key}", engine_args.additional_config.get(key))


def _span_ids(
    spans: tuple[Span, ...], model_config: "ModelConfig"
) -> tuple[tuple[int, int | None], ...]:
    vocab = model_config.get_vocab_size()
    texts = [token for span in spans for token in span if isinstance(token, str)]
    tokens = _tokenizer(model_config).get_vocab() if texts else {}

    def id_of(token: Token) -> int:
        number = tokens.get(token) if isinstance(token, str) else token
        if number is None:
            raise ValueError(
                f"mars_strict_spans: {shown(token)} is not one token of this model; give a single "
                "token (its text or id) that marks the span."
            )
        if number >= vocab:
            raise ValueError(
                f"mars_strict_spans: {shown(number)} is outside the model's vocabulary [0, "
                f"{vocab}); give the id of the token that marks the span."
            )
        return number

    ids = [(id_of(start), None if end is None else id_of(end)) for start, end in spans]
    starts = [start for start, _ in ids]
    repeated = sorted({start for start in starts if starts.count(start) > 1})
    if repeated:
        raise ValueError(f"mars_strict_spans: token {repeated[0]} starts two spans; name it once.")
    if len(ids) > MAX_SPANS:
        raise ValueError(
            f"mars_strict_spans has {len(ids)} spans, but the limit is {MAX_SPANS}; drop those "
            "that cannot occur."
        )
    return tuple(ids)


def _spans_of_tool_parser(
    name: str, model_config: "ModelConfig"
) -> tuple[tuple[int, int | None], ...]:
    """Returns the markers of a tool parser that are single tokens."""
    from vllm.tool_parsers import ToolParserManager

    tokenizer = _tokenizer(model_config)
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except (KeyError, RuntimeError, ValueError) as error:
        # vLLM itself rejects an unusable parser.
        logger.warning("No strict spans: the tool parser %s cannot be created (%s).", name, error)
        return ()
    vocab = tokenizer.get_vocab()
    spans: dict[int, int | None] = {}
    markers = list(_tool_markers(parser))
    for start, end in markers:
        # Some parsers have a marker twice, but only once with its end.
        if start in vocab and spans.get(vocab[start]) is None:
            spans[vocab[start]] = None if end is None else vocab.get(end)
    if not spans:
        why = "are not single tokens of this model" if markers else "are not known"
        logger.warning(
            "No strict spans: the markers of the tool parser %s %s; mars_strict_spans can name "
            "others.",
            name,
            why,
        )
    return tuple(spans.items())[:MAX_SPANS]


def _tool_markers(parser: Any) -> Iterator[tuple[str, str | None]]:
    """Yields the start and end texts of a parser's tool calls; the end is None if there is none."""
    # Newer parsers have an engine configured with terminals, others have the attributes below.
    engine = getattr(parser, "_parser_engine", None)
    terminals = getattr(getattr(engine, "parser_engine_config", None), "terminals", {})
    starts, ends = (_spellings(terminals.get(name)) for name in ("TOOL_START", "TOOL_END"))
    for start in starts:
        yield start, next(iter(ends), None)
    for name in dir(parser):
        if name.startswith("tool") and name.endswith("start_token"):
            text = getattr(parser, name, None)
            end = getattr(parser, name.removesuffix("start_token") + "end_token", None)
            if isinstance(text, str):
                yield text, end if isinstance(end, str) else None


def _spellings(terminal: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (terminal,) if isinstance(terminal, str) else terminal or ()


def _thinking(
    config: MarsConfig, engine_args: Any, model_config: "ModelConfig"
) -> tuple[int | None, int | None]:
    """Returns the tokens that begin and end the thinking section; None for unknown ones."""
    from vllm.config.reasoning import ReasoningConfig

    config_args = engine_args.reasoning_config or {}
    reasoning = (
        ReasoningConfig(**config_args) if isinstance(config_args, dict) else replace(config_args)
    )
    reasoning.reasoning_parser = (
        engine_args.reasoning_parser
        or reasoning.reasoning_parser
        or getattr(engine_args.structured_outputs_config, "reasoning_parser", "")
    )
    if not reasoning.reasoning_parser and not reasoning.reasoning_start_str:
        return None, None
    reasoning.initialize_token_ids(model_config)
    start = reasoning.reasoning_start_token_ids or []
    # The natural end, not the text that a thinking budget forces.
    end = reasoning.natural_reasoning_end_token_ids or []
    if len(end) == 1:
        is_section = len(start) == 1 and start != end
        return int(start[0]) if is_section else None, int(end[0])
    if config.opening:
        logger.warning(
            "Only the start of an answer is a strict opening: the end of the thinking section is "
            "%d tokens of this model, not one.",
            len(end),
        )
    return None, None


def _tokenizer(model_config: "ModelConfig") -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        raise ValueError(
            "mars_strict_spans needs a tokenizer for text (--skip-tokenizer-init is set); name "
            "the tokens by their ids."
        )
    return tokenizer
