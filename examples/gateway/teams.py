"""LiteLLM's hooks: a key belongs to a team, and the team says how its answers are verified."""

import os
from typing import Any

from fastapi import Request
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy._types import ProxyException, UserAPIKeyAuth

# What a team's requests bring to the server, whatever they asked for; nothing is strict.
TEAMS: dict[str, dict[str, Any]] = {"chat": {"mars_max_loss": 0.02}, "billing": {}}
KEYS = {os.environ[f"{team.upper()}_KEY"]: team for team in TEAMS}
# LiteLLM also hands whole requests on, under other paths and past the hook below.
PATHS = {"/v1/models", "/v1/chat/completions", "/v1/completions"}
# What a body may have. LiteLLM acts on other keys: `fallbacks` and its like replace parts of a
# request after its first try, past the hook below.
BODY = {
    *("model", "messages", "prompt", "suffix", "stream", "stream_options", "n", "echo", "stop"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
    *("ignore_eos", "logprobs", "top_logprobs", "response_format", "structured_outputs"),
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"),
    *("user", "metadata", "vllm_xargs", "extra_body"),
}


async def authenticate(request: Request, api_key: str) -> UserAPIKeyAuth:
    """The team of a key.

    Raises:
        ProxyException: no team has this key, or nobody may ask for this path or send this body.
    """
    if api_key not in KEYS:
        raise ProxyException("This key belongs to no team.", "auth_error", "api_key", 401)
    if request.url.path not in PATHS:
        allowed = ", ".join(sorted(PATHS))
        message = f"{request.url.path} is not one of {allowed}; ask for one of them."
        raise ProxyException(message, "auth_error", "path", 403)
    if request.method == "POST":
        for key in (await request.json()).keys() - BODY:
            message = f"{key} is not among the keys that this gateway passes on; leave it out."
            raise ProxyException(message, "invalid_request_error", key, 400)
    return UserAPIKeyAuth(api_key=api_key, team_id=KEYS[api_key])


class Rule(CustomLogger):
    """Replaces `vllm_xargs` by the team's own before a request goes to the server."""

    async def async_pre_call_hook(
        self, user_api_key_dict: UserAPIKeyAuth, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        """Returns the body of the request as the server gets it."""
        # LiteLLM merges what stands in `extra_body` into the body.
        for key in ("vllm_xargs", "extra_body"):
            data.pop(key, None)
        if own := TEAMS[user_api_key_dict.team_id]:
            data["vllm_xargs"] = dict(own)
        return data


rule = Rule()
