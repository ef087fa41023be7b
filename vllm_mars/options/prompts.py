"""Start of a prompt's last message: after the last token that ends a message.

Markers that this message leaves open are open where the answer begins
(`vllm_mars.kernels.constraints.markers`). A token ends a message if the chat template uses it so,
not because it is special: separators within a tool call are also special. So the front end renders
the template once and looks for the tokens between the texts.
"""

import itertools
import logging
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm_mars.kernels.constraints.markers import MarkerTracker
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.protection import section_markers, special_tokens
from vllm_mars.options.requests import UNKNOWN_PROMPT

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger(f"vllm.{__name__}")

# Texts of the rendered messages, which no template contains.
_WORDS = ("Marzipan", "Zwieback", "Tangerine")


def turns_of(
    config: MarsConfig, chat_template: str | None, model_config: "ModelConfig"
) -> tuple[int, ...] | None:
    """Returns the ids of the tokens by which the chat template ends a message.

    After the text of each message, this is the first special token that is not a section marker.
    Returns None if they are unknown, which is logged, or if there are no section markers.
    """
    markers = section_markers(config)
    if not markers:
        return None
    special = special_tokens(model_config)
    ids = {text: token for text, token in special.items() if token not in markers}
    reason = "there is no tokenizer"
    for words, rendered in _rendered(chat_template, model_config) if special else ():
        offsets = [rendered.find(word) for word in words]
        if min(offsets) >= 0:
            return _ends(rendered, offsets, ids)
        reason = rendered
    logger.warning(
        "It is not known by which tokens the chat template ends a message (%s). A request whose "
        "prompt may have opened a span or the thinking section is verified strictly.",
        reason,
    )
    return None


def _rendered(
    chat_template: str | None, model_config: "ModelConfig"
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the texts of test conversations, each with its prompt or the error of rendering it."""
    from vllm.renderers import hf
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.tokenizers.registry import tokenizer_args_from_config

    tokenizer: Any = cached_tokenizer_from_config(model_config)
    mode, *_ = tokenizer_args_from_config(model_config)
    for words, as_parts in itertools.product((_WORDS, _WORDS[:1]), (False, True)):
        messages: list[Any] = [
            {"role": role, "content": [{"type": "text", "text": word}] if as_parts else word}
            for role, word in zip(("user", "assistant", "user"), words, strict=False)
        ]
        settings: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        try:
            apply = tokenizer.apply_chat_template
            if mode == "hf":
                settings["chat_template"] = hf.load_chat_template(chat_template)
                apply = partial(hf.safe_apply_chat_template, model_config, tokenizer)
            yield words, apply(messages, **settings)
        except hf.ChatTemplateResolutionError:
            # Without a template no token ends a message.
            yield words, " ".join(words)
        except Exception as error:  # templates can raise any exception
            yield words, f"{type(error).__name__}: {error}"


def _ends(rendered: str, offsets: list[int], ids: dict[str, int]) -> tuple[int, ...]:
    """Returns the ids of the first known token after each offset."""
    # Longest first, because one text may be a prefix of another.
    texts = "|".join(map(re.escape, sorted(filter(None, ids), key=len, reverse=True)))
    ends = set()
    for begin, end in pairwise([*offsets, len(rendered)]):
        if texts and (match := re.search(texts, rendered[begin:end])):
            ends.add(ids[match[0]])
    return tuple(sorted(ends))


def flag_unknown_prompts(scheduler: Any, config: MarsConfig) -> None:
    """Makes a vLLM scheduler flag requests for strict verification if open markers are unknown.

    A prompt may consist of embeddings, or its last message may begin anywhere.
    """
    tracker = MarkerTracker(config)
    add_request = scheduler.add_request

    def add_and_flag(request: Any, *args: Any, **kwargs: Any) -> Any:
        params = request.sampling_params
        prompt = request.prompt_token_ids
        if request.prompt_embeds is not None:
            prompt = None
        elif existing := scheduler.requests.get(request.request_id):
            # More input for an existing request.
            prompt = [*existing.all_token_ids, *(prompt or ())]
        if params is not None and not tracker.is_known(prompt):
            # The workers receive the flag with the request's parameters.
            params.extra_args = {**(params.extra_args or {}), UNKNOWN_PROMPT: True}
        return add_request(request, *args, **kwargs)

    scheduler.add_request = add_and_flag
