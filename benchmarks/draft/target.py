"""The target: its answers by vLLM, and the hidden states that an EAGLE-3 head is fed.

The states are those that vLLM hands to `method: "eagle3"`: state i is what layer i takes in (hidden
+ residual), and state `num_hidden_layers` is what the final norm takes in.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.draft.data import Answer
from vllm_mars.servers.vllm_args import CPU_ENGINE_ARGS

HAS_GPU = torch.cuda.is_available()


class Target:
    """A Llama checkpoint, read for its hidden states, on a GPU where there is one.

    Its linear layers compute in `dtype`, by default bfloat16 where the processor multiplies it; the
    residual stream is in float32.
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        has_bf16 = HAS_GPU or torch.cpu._is_avx512_bf16_supported()
        self.dtype = dtype or (torch.bfloat16 if has_bf16 else torch.float32)
        self.device = torch.device("cuda" if HAS_GPU else "cpu")
        whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(self.device)
        self.config = whole.config
        depth = self.config.num_hidden_layers
        # The states that are kept: vLLM's default, which is an early, a middle and a late one, and
        # the last, from which the target's distribution follows.
        self.aux_layers = tuple(sorted({min(2, depth), depth // 2, max(0, depth - 3), depth}))
        self.model = whole.model.requires_grad_(False)
        self.layers = self.model.layers
        self.embedding: torch.Tensor = self.model.embed_tokens.weight.data
        self.final_norm: torch.Tensor = self.model.norm.weight.data
        self.lm_head: torch.Tensor = whole.lm_head.weight.data
        self._states: list[torch.Tensor] = [torch.empty(0) for _ in self.aux_layers]
        for index, layer in enumerate(self.aux_layers):
            reader = [*self.layers, self.model.norm][layer]
            reader.register_forward_pre_hook(partial(self._keep, index))

    def _keep(self, index: int, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._states[index] = inputs[0]

    def autocast(self) -> torch.autocast:
        """Returns the context in which linear layers compute in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, self.dtype != torch.float32)

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the states at each of [batch, n] tokens, as [batch, n, aux, hidden] float32."""
        with self.autocast():
            self.model(tokens, use_cache=False)
        return torch.stack(self._states, 2)

    @torch.no_grad()
    def probabilities(self, last_state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns how probable tokens are among each other, [..., tokens], from the last state."""
        size, eps = last_state.shape[-1:], self.config.rms_norm_eps
        normed = functional.rms_norm(last_state, size, self.final_norm, eps)
        with self.autocast():
            return functional.linear(normed, self.lm_head[tokens]).float().softmax(-1)


@contextmanager
def vllm_answers(model: Path) -> Iterator[Answer]:
    """Runs an engine of a model, which answers."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), **({"dtype": "bfloat16"} if HAS_GPU else CPU_ENGINE_ARGS))

    def answer(asked: list[list[int]], heat: list[float], longest: int, seed: int) -> Any:
        # On a CPU, a request with a seed ends vLLM's engine where its prompt is cut into chunks.
        seeds = [seed + row if HAS_GPU else None for row in range(len(asked))]
        options = [
            SamplingParams(temperature=one, max_tokens=longest, seed=own)
            for one, own in zip(heat, seeds, strict=True)
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], options)
        return [list(output.outputs[0].token_ids) for output in outputs]

    try:
        yield answer
    finally:
        llm.llm_engine.engine_core.shutdown()
