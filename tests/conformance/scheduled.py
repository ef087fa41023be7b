"""What reaches a sampler of a step's drafts, by vLLM's own scheduler and grammar, without a model.

Tokens are letters; each request has an answer that a regular expression describes.
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
    """A step as vLLM sends it to its workers.

    Attributes:
        output: with the drafts to verify.
        grammar: what masks the logits.
        ids: of the requests.
    """

    output: SchedulerOutput
    grammar: GrammarOutput
    ids: list[str]

    @property
    def drafts(self) -> list[list[int]]:
        """Of each request, what a worker of V1 verifies."""
        return [self.output.scheduled_spec_decode_tokens.get(own, []) for own in self.ids]

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Masks `[num_rows, vocab]` logits as a worker of V1, and returns them."""
        apply_grammar_bitmask(self.output, self.grammar, SimpleNamespace(req_ids=self.ids), logits)
        return logits


def write_model(directory: Path) -> str:
    """Writes what configures an engine, and returns where."""
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
    """A scheduler of requests whose drafts are drawn.

    Args:
        model: see `write_model`.
        num_draft: tokens of a draft.
        is_async: whether steps are scheduled before the last one's tokens are known.
        options: of the speculative config.
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
        # On a CPU vLLM switches it off.
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
        """The step in which so many requests come."""
        for place in range(number):
            params = SamplingParams(
                max_tokens=16, structured_outputs=StructuredOutputsParams(regex=regex), **sampling
            )
            params.structured_outputs._backend = "xgrammar"
            params.update_from_generation_config({}, END)
            request = Request(str(place), [0, 1], params, None)
            self._manager.grammar_init(request)
            request.structured_output_request._grammar.result()
            self.scheduler.add_request(request)
        return self.scheduler.schedule()

    def end(self, output: SchedulerOutput, token: int) -> None:
        """Ends a step in which each request samples the same token."""
        ids = list(output.num_scheduled_tokens)
        places = {own: place for place, own in enumerate(ids)}
        sampled = ModelRunnerOutput(ids, places, [[token] for _ in ids])
        self.scheduler.update_from_output(output, sampled)

    def draft(
        self, paths: Sequence[Sequence[int]], regex: str, answer: int, **sampling
    ) -> Scheduled:
        """The step that verifies a draft of each request, whose answers so far are one token."""
        prompts = self.enter(len(paths), regex, **sampling)
        ids = list(prompts.num_scheduled_tokens)
        drawn = DraftTokenIds(ids, [[*path] for path in paths])
        if self._is_async:
            output = self.scheduler.schedule()
            self.end(prompts, answer)
            self.scheduler.update_draft_token_ids_in_output(drawn, output)
        else:
            self.end(prompts, answer)
            self.scheduler.update_draft_token_ids(drawn)
            output = self.scheduler.schedule()
        return Scheduled(output, self.scheduler.get_grammar_bitmask(output), ids)


@dataclass(frozen=True)
class Grammatical(Case):
    """A case whose answer follows a grammar, of which the drafts know nothing.

    Attributes:
        regex: what the whole answer matches.
    """

    regex: str = ""

    @property
    def config(self) -> MarsConfig:
        """Relaxes what is not structured output."""
        return MarsConfig(price=1.0, strict_opening=0)

    def params(self, seed: int = 0) -> SamplingParams:
        params = super().params(seed)
        params.structured_outputs = StructuredOutputsParams(regex=self.regex)
        return params

    @functools.cache  # noqa: B019
    def row(self, before: Tokens) -> Row:
        row = super().row(before)
        text = "".join(WORDS[token] for token in (*self.answer, *before))
        # Behind what is forbidden, or the end, nothing is.
        is_open = END not in before and regex.fullmatch(self.regex, text, partial=True)
        logits = row.logits.copy()
        for token in range(self.vocab) if is_open else ():
            more = text + LETTERS[token] if token < END else text
            if not regex.fullmatch(self.regex, more, partial=token < END):
                logits[token] = -np.inf
        return row._replace(logits=logits, p=special.softmax(logits.astype(float)))


def logits_of(case: Case, drafts: Sequence[Sequence[int]]) -> torch.Tensor:
    """The rows of a step before a grammar masks them; float32 `[num_rows, vocab]`."""
    rows = [Case.row(case, tuple(own[:i])) for own in drafts for i in range(len(own) + 1)]
    return torch.tensor(np.array([row.logits for row in rows]))


# What follows depends on the place and on the tokens before; by the second an answer may end.
REGEXES = {
    "a(a[abd]|b[a-c]|c[b-e]|d[acd])[a-e]{9}": 2,
    "a(b|[acd][a-d]{0,9})": 2,
    "a[ab][a-e]{9}": 1,
}
# A mask is as wide as the vocabulary, and vLLM's kernel does not look how wide logits are.
CASES = [
    Grammatical(True, price=0.0, seed=seed, steps=steps, vocab=len(WORDS), ends=(END,), regex=own)
    for seed, (own, steps) in itertools.product((1, 3), REGEXES.items())
]
