"""Drafts as vLLM's scheduler and grammar pass them to a sampler, without a model.

Tokens are letters; each answer must match a regular expression.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import regex
import torch
from scipy import special
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from enumerated import Case, Row, Tokens
from vllm_mars import MarsConfig

LETTERS = "abcde"
END = len(LETTERS)
WORDS = [*LETTERS, "</s>"]
MARS = {"rejection_sample_method": "mars", "mars_price": 1.0}


class Scheduled(NamedTuple):
    """A step as vLLM sends it to its workers: drafts, masks of the logits, and request ids."""

    output: SchedulerOutput
    grammar: GrammarOutput
    ids: list[str]

    @property
    def drafts(self) -> list[list[int]]:
        """The draft of each request that a V1 worker verifies."""
        return [self.output.scheduled_spec_decode_tokens.get(req_id, []) for req_id in self.ids]

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Masks `[num_rows, vocab]` logits as a V1 worker, and returns them."""
        apply_grammar_bitmask(self.output, self.grammar, SimpleNamespace(req_ids=self.ids), logits)
        return logits


def write_model(directory: Path) -> str:
    """Writes the files that configure an engine; returns the directory."""
    LlamaConfig(
        vocab_size=END + 1,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
        eos_token_id=END,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    vocab = {token: number for number, token in enumerate(WORDS)}
    built = Tokenizer(WordLevel(vocab, WORDS[END]))
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token=WORDS[END]).save_pretrained(directory)
    return str(directory)


class Engine:
    """A scheduler of requests with probabilistic drafts.

    If `is_async`, it schedules steps before the last step's tokens are known.
    """

    def __init__(self, model: str, num_draft: int, is_async: bool = False, **options) -> None:
        drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": num_draft}
        config = EngineArgs(
            model,
            dtype="float32",
            max_model_len=32,
            max_num_seqs=2048,
            max_num_batched_tokens=1 << 14,
            speculative_config={**drafts, "draft_sample_method": "probabilistic", **options},
        ).create_engine_config()
        # vLLM disables it on a CPU.
        config.scheduler_config.async_scheduling = self._is_async = is_async
        config.cache_config.num_gpu_blocks = 1 << 13
        attention = FullAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layer"], attention)]
        self._manager = StructuredOutputManager(config)
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            config,
            KVCacheConfig(1 << 13, [], groups),
            self._manager,
            block_size=16,
            log_stats=True,
        )

    def enter(self, number: int, regex: str, **sampling) -> SchedulerOutput:
        """Adds requests, and schedules their prompts."""
        for index in range(number):
            params = SamplingParams(
                max_tokens=16, structured_outputs=StructuredOutputsParams(regex=regex), **sampling
            )
            params.structured_outputs._backend = "xgrammar"
            params.update_from_generation_config({}, END)
            request = Request(str(index), [0, 1], params, None)
            self._manager.grammar_init(request)
            request.structured_output_request._grammar.result()
            self.scheduler.add_request(request)
        return self.scheduler.schedule()

    def end(self, output: SchedulerOutput, token: int) -> None:
        """Ends a step in which every request samples the same token."""
        ids = list(output.num_scheduled_tokens)
        indices = {req_id: index for index, req_id in enumerate(ids)}
        sampled = ModelRunnerOutput(ids, indices, [[token] for _ in ids])
        self.scheduler.update_from_output(output, sampled)

    def draft(
        self, paths: Sequence[Sequence[int]], regex: str, answer: int, **sampling
    ) -> Scheduled:
        """Schedules the verification of drafts of new requests with one output token."""
        prompts = self.enter(len(paths), regex, **sampling)
        ids = list(prompts.num_scheduled_tokens)
        drafts = DraftTokenIds(ids, [[*path] for path in paths])
        if self._is_async:
            output = self.scheduler.schedule()
            self.end(prompts, answer)
            self.scheduler.update_draft_token_ids_in_output(drafts, output)
        else:
            self.end(prompts, answer)
            self.scheduler.update_draft_token_ids(drafts)
            output = self.scheduler.schedule()
        return Scheduled(output, self.scheduler.get_grammar_bitmask(output), ids)


@dataclass(frozen=True)
class Grammatical(Case):
    """A case whose whole answer must match a regular expression, which drafts do not know."""

    regex: str = ""

    @property
    def config(self) -> MarsConfig:
        """Relaxes requests without structured output."""
        return MarsConfig(price=1.0, strict_opening=0)

    def params(self, seed: int = 0) -> SamplingParams:
        params = super().params(seed)
        params.structured_outputs = StructuredOutputsParams(regex=self.regex)
        return params

    @functools.cache  # noqa: B019
    def row(self, before: Tokens) -> Row:
        row = super().row(before)
        text = "".join(WORDS[token] for token in (*self.answer, *before))
        # No row follows a forbidden token or the end.
        is_open = END not in before and regex.fullmatch(self.regex, text, partial=True)
        logits = row.logits.copy()
        for token in range(self.vocab) if is_open else ():
            more = text + LETTERS[token] if token < END else text
            if not regex.fullmatch(self.regex, more, partial=token < END):
                logits[token] = -np.inf
        return row._replace(logits=logits, p=special.softmax(logits.astype(float)))


def logits_of(case: Case, drafts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of a step before the grammar masks them; float32 `[num_rows, vocab]`."""
    rows = [Case.row(case, tuple(draft[:i])) for draft in drafts for i in range(len(draft) + 1)]
    return torch.tensor(np.array([row.logits for row in rows]))


# Draft lengths by regular expression. Allowed tokens depend on the position and the tokens before;
# an answer may end by the second.
REGEXES = {
    "a(a[abd]|b[a-c]|c[b-e]|d[acd])[a-e]{9}": 2,
    "a(b|[acd][a-d]{0,9})": 2,
    "a[ab][a-e]{9}": 1,
}
# The mask has the vocabulary's width, and vLLM's kernel does not check the width of the logits.
CASES = [
    Grammatical(
        True, price=0.0, seed=seed, steps=steps, vocab=len(WORDS), ends=(END,), regex=pattern
    )
    for seed, (pattern, steps) in itertools.product((1, 3), REGEXES.items())
]
