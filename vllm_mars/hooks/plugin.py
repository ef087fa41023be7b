"""Table of import hooks, registered in each vLLM process before its worker class is imported.

Hooks are strings, so their code is imported only in processes that import the hooked module.
"""

from typing import Any

import wrapt

# Environment variables that vLLM would report as unknown or refuse.
VARIABLES = (
    "VLLM_MARS_CACHE",
    "VLLM_MARS_LOCK",
    "VLLM_MARS_OVERRIDES",
)
HOOKS = {
    "vllm.envs": "vllm_mars.hooks.plugin:add_variables",
    "vllm.engine.arg_utils": "vllm_mars.hooks.patches:patch_engine_args",
    "vllm.v1.engine.async_llm": "vllm_mars.hooks.patches:patch_async_llm",
    "vllm.entrypoints.openai.chat_completion.serving": "vllm_mars.hooks.patches:patch_chat",
    "vllm.entrypoints.openai.completion.serving": "vllm_mars.hooks.patches:patch_completions",
    "vllm.entrypoints.openai.responses.serving": "vllm_mars.hooks.patches:patch_responses",
    "vllm.v1.engine.llm_engine": "vllm_mars.hooks.patches:patch_llm_engine",
    "vllm.v1.engine.output_processor": "vllm_mars.hooks.patches:patch_output_processor",
    "vllm.v1.engine.input_processor": "vllm_mars.hooks.patches:patch_input_processor",
    "vllm.v1.core.sched.scheduler": "vllm_mars.hooks.patches:patch_scheduler",
    "vllm.v1.metrics.loggers": "vllm_mars.hooks.patches:patch_stat_loggers",
    "vllm.v1.metrics.stats": "vllm_mars.hooks.patches:patch_stats",
    "vllm.v1.worker.gpu_model_runner": "vllm_mars.hooks.patches:patch_runner_v1",
    "vllm.v1.worker.gpu.model_runner": "vllm_mars.hooks.patches:patch_runner_v2",
}


def add_variables(envs: Any) -> None:
    for name in VARIABLES:
        # vLLM hashes the values into its compile cache key, and no variable changes a model.
        envs.environment_variables[name] = lambda: None


def register() -> None:
    """Entry point in the group `vllm.general_plugins`; idempotent and cheap."""
    for module, hook in HOOKS.items():
        wrapt.register_post_import_hook(hook, module)
