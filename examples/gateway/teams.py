"""LiteLLM's hooks: a key belongs to a team, whose setting decides how answers are verified."""

import os
from typing import Any

from fastapi import Request
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy._types import ProxyException, UserAPIKeyAuth

# Options of a team's requests, which replace those of a request; without options it is strict.
TEAMS: dict[str, dict[str, Any]] = {"chat": {"mars_max_loss": 0.02}, "billing": {}}
KEYS = {os.environ[f"{team.upper()}_KEY"]: team for team in TEAMS}
# Under other paths LiteLLM forwards whole requests without the hook below.
PATHS = {"/v1/models", "/v1/chat/completions", "/v1/completions"}
# Allowed keys of a body. Some others, such as `fallbacks`, replace parts of a request after its
# first try, without the hook below.
BODY = {
    *("model", "messages", "prompt", "suffix", "stream", "stream_options", "n", "echo", "stop"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
    *("ignore_eos", "logprobs", "top_logprobs", "response_format", "structured_outputs"),
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"),
    *("user", "metadata", "vllm_xargs", "extra_body"),
}


async def authenticate(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Returns the team of a key.

    Raises:
        ProxyException: no team has this key, or the path or the body is not allowed.
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
    """Replaces `vllm_xargs` by the team's before a request goes to the server."""

    async def async_pre_call_hook(
        self, user_api_key_dict: UserAPIKeyAuth, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        """Returns the body of the request as the server gets it."""
        # LiteLLM merges `extra_body` into the body.
        for key in ("vllm_xargs", "extra_body"):
            data.pop(key, None)
        if options := TEAMS[user_api_key_dict.team_id]:
            data["vllm_xargs"] = dict(options)
        return data


rule = Rule()
