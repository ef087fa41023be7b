"""The target: its answers by vLLM, and the hidden states that an EAGLE-3 head is fed.

The states are those that vLLM hands to `method: "eagle3"`: state i is what layer i takes in (hidden
+ residual), and state `num_hidden_layers` is what the final norm takes in.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from vllm_mars.local.vllm_args import CPU_ENGINE_ARGS

# Prompts and temperatures, the longest answer, a seed; gives each answer, with its end.
Answer = Callable[[list[list[int]], list[float], int, int], list[list[int]]]


class Target:
    """A Llama checkpoint, read for its hidden states on the CPU.

    Args:
        directory: Hugging Face directory with config.json and model.safetensors.
        dtype: of the linear layers; the residual stream is in float32.

    Attributes:
        aux_layers: which states are kept: vLLM's default, which is an early, a middle and a late
            one, and the last, from which the target's distribution follows.
    """

    def __init__(self, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.config = whole.config
        self.dtype = dtype
        depth = self.config.num_hidden_layers
        self.aux_layers = tuple(sorted({min(2, depth), depth // 2, max(0, depth - 3), depth}))
        self.model = whole.model.requires_grad_(False)
        self.layers = self.model.layers
        self.embedding: torch.Tensor = self.model.embed_tokens.weight.data
        self.final_norm: torch.Tensor = self.model.norm.weight.data
        self.lm_head: torch.Tensor = whole.lm_head.weight.data.to(dtype)
        for module in self.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.to(dtype)
        self._states: list[torch.Tensor] = [torch.empty(0) for _ in self.aux_layers]
        for index, layer in enumerate(self.aux_layers):
            reader = [*self.layers, self.model.norm][layer]
            reader.register_forward_pre_hook(partial(self._keep, index))

    def _keep(self, index: int, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._states[index] = inputs[0][0]

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the states at each of [n] tokens, as [n, aux, hidden] float32."""
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            self.model(tokens[None], use_cache=False)
        return torch.stack(self._states, 1)

    def normed(self, last_state: torch.Tensor) -> torch.Tensor:
        """Returns what lm_head takes in, of states that the final norm takes in."""
        size, eps = last_state.shape[-1:], self.config.rms_norm_eps
        return functional.rms_norm(last_state.float(), size, self.final_norm, eps).to(self.dtype)


def vllm_answers(model: Path) -> tuple[Answer, Callable[[], None]]:
    """Starts an engine of a model; returns what answers, and what ends it."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), **CPU_ENGINE_ARGS)

    def answer(
        prompts: list[list[int]], heat: list[float], max_tokens: int, seed: int
    ) -> list[list[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            [
                SamplingParams(temperature=one, max_tokens=max_tokens, seed=seed + row)
                for row, one in enumerate(heat)
            ],
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer, llm.llm_engine.engine_core.shutdown
