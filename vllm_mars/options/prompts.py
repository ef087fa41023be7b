"""Where the last message of a prompt begins: behind the last token that ends one.

What it opens is open where the answer begins (`vllm_mars.kernels.constraints.markers`). A token
ends a message because the chat template uses it so, not because it is special: separators within a
tool call are special, too. So the front end renders the template once, and looks what stands
between the texts.
"""

import itertools
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm_mars.kernels.constraints.markers import MarkerTracker
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.protection import section_markers, special_tokens
from vllm_mars.options.requests import UNKNOWN_PROMPT

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# What the messages of a conversation say here. No template does.
_WORDS = ("Marzipan", "Zwieback", "Tangerine")


def turns_of(
    config: MarsConfig, chat_template: str | None, model_config: "ModelConfig"
) -> tuple[int, ...] | None:
    """The tokens by which the chat template ends a message.

    Args:
        config: the options, with the markers of all sections.
        chat_template: the server's own, or its path; None for the model's.
        model_config: gives the tokenizer.

    Returns:
        Their ids: of each message the first special token behind its text, unless that marks a
        section. None where they are not known, which is logged, or nothing depends on them.
    """
    markers = section_markers(config)
    if not markers:
        return None
    special = special_tokens(model_config)
    ids = {text: token for text, token in special.items() if token not in markers}
    why = "there is no tokenizer"
    for words, rendered in _rendered(chat_template, model_config) if special else ():
        places = [rendered.find(word) for word in words]
        if min(places) >= 0:
            return _ends(rendered, places, ids)
        why = rendered
    from vllm.logger import init_logger

    init_logger("vllm.vllm_mars.options.prompts").warning(
        "It is not known by which tokens the chat template ends a message (%s). A request whose "
        "prompt may have opened a span or the thinking section is verified strictly.",
        why,
    )
    return None


def _rendered(
    chat_template: str | None, model_config: "ModelConfig"
) -> Iterator[tuple[tuple[str, ...], str]]:
    """What conversations say, and each as a prompt; an error's text where it cannot be one."""
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
        form: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        try:
            if mode == "hf":
                form["chat_template"] = hf.load_chat_template(chat_template)
                yield words, hf.safe_apply_chat_template(model_config, tokenizer, messages, **form)
            else:
                yield words, tokenizer.apply_chat_template(messages, **form)
        except hf.ChatTemplateResolutionError:
            # Without a template nothing ends a message.
            yield words, " ".join(words)
        except Exception as error:  # a template raises what it likes
            yield words, f"{type(error).__name__}: {error}"


def _ends(rendered: str, places: list[int], ids: dict[str, int]) -> tuple[int, ...]:
    """The first of some tokens behind each of some places."""
    # The longest first, where one begins another.
    texts = "|".join(map(re.escape, sorted(filter(None, ids), key=len, reverse=True)))
    found = set()
    for begin, end in pairwise([*places, len(rendered)]):
        if texts and (match := re.search(texts, rendered[begin:end])):
            found.add(ids[match[0]])
    return tuple(sorted(found))


def flag_unknown_prompts(scheduler: Any, config: MarsConfig) -> None:
    """Makes a scheduler hold requests to strict verification of which not all is known.

    Which sections the prompt has opened may not be: it has embeddings, or its last message may
    begin anywhere. What the scheduler notes reaches the workers with the request's parameters.

    Args:
        scheduler: vLLM's `Scheduler`, or a subclass of it. Its `add_request` is wrapped, on this
            instance alone.
        config: the server's options.
    """
    tracker, add_request = MarkerTracker(config), scheduler.add_request

    def add_and_note(request: Any, *args: Any, **kwargs: Any) -> Any:
        params, prompt = request.sampling_params, request.prompt_token_ids
        if request.prompt_embeds is not None:
            prompt = None
        elif before := scheduler.requests.get(request.request_id):
            # A further input of a request that is there already.
            prompt = [*before.all_token_ids, *(prompt or ())]
        if params is not None and not tracker.is_known(prompt):
            params.extra_args = {**(params.extra_args or {}), UNKNOWN_PROMPT: True}
        return add_request(request, *args, **kwargs)

    scheduler.add_request = add_and_note
