"""What `benchmarks.kernel` times: this project's kernels, torch, and vLLM's own samplers.

All verify the same greedy step. vLLM's samplers are imported; where an installed vLLM lacks one, or
cannot run it here, the variant carries the reason instead.
"""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from vllm_mars import verify_greedy
from vllm_mars.kernels.terms import Drafts, Margin
from vllm_mars.verify import judge_drafts, verify_drafts

THETA = 0.9
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# Tensors, and None where a field of a `VerifyOutput` was not asked for.
Outputs = tuple[Any, ...]


class Shape(NamedTuple):
    """One cell of the grid; each request has `k` draft tokens."""

    batch: int
    k: int
    vocab: int
    dtype: str

    def __str__(self) -> str:
        return f"batch {self.batch}, K {self.k}, vocab {self.vocab:,}, {self.dtype}"

    @property
    def rows(self) -> int:
        """Rows of logits: one for each draft token, and one for each request's bonus token."""
        return self.batch * (self.k + 1)

    @property
    def logits_bytes(self) -> int:
        """What any verification must read once."""
        return self.rows * self.vocab * DTYPES[self.dtype].itemsize


class NotApplicableError(Exception):
    """This variant has no meaning for this step, or this vLLM does not have it."""


class MismatchError(Exception):
    """A variant gave other tokens than the reference."""


class Step:
    """The inputs of one step, random and the same at each call.

    A request's rows are its draft rows and then its bonus row.

    Attributes:
        shape: the cell of the grid.
        logits: `[batch * (k + 1), vocab]`.
        drafts: `[batch * k]` int32; the target's first choice with probability 0.6, else its
            second or third.
        ends: `[batch]` int32, inclusive prefix sum of the draft lengths.
        target_rows: `[batch * k]` int32.
        bonus_rows: `[batch]` int32.
        protected: `[vocab]` bool, one token in 97.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        batch, k, vocab, dtype = shape
        logits = torch.empty(shape.rows, vocab, device=device).normal_(0, 3, generator=generator)
        rows = torch.arange(shape.rows, device=device, dtype=torch.int32).view(batch, k + 1)
        rank = torch.rand(batch * k, device=device, generator=generator)
        rank = (rank > 0.6).long() + (rank > 0.85)
        self.shape = shape
        self.logits = logits.to(DTYPES[dtype])
        self.target_rows = rows[:, :-1].flatten()
        best = self.logits.topk(3).indices[self.target_rows]
        self.drafts = best.gather(1, rank[:, None]).squeeze(1).int()
        self.ends = torch.arange(1, batch + 1, device=device, dtype=torch.int32) * k
        self.bonus_rows = rows[:, -1].contiguous()
        self.protected = torch.arange(vocab, device=device) % 97 == 0

    def verify(self, theta: float | torch.Tensor, **options: Any) -> Callable[..., Any]:
        """`verify_greedy` of this step, to be called with a backend."""
        return functools.partial(
            verify_greedy,
            self.logits,
            self.drafts,
            self.ends,
            None,
            theta,
            protected=self.protected,
            target_rows=self.target_rows,
            bonus_rows=self.bonus_rows,
            max_draft_len=self.shape.k,
            **options,
        )

    @functools.cached_property
    def input_tokens(self) -> torch.Tensor:
        """`[batch * (k + 1)]` int32: a row's draft token is the model's input at the next row."""
        inputs = self.drafts.new_zeros(self.shape.batch, self.shape.k + 1)
        inputs[:, 1:] = self.drafts.view(self.shape.batch, self.shape.k)
        return inputs.flatten()

    @functools.cached_property
    def strict(self) -> torch.Tensor:
        """`[batch, k + 1]` int32, what strict verification emits."""
        tokens: torch.Tensor = self.verify(1.0)(backend="torch").output_token_ids
        return tokens


@dataclass
class Variant:
    """Something to time.

    Attributes:
        run: what is timed; returns the tensors that it wrote.
        answer: makes of them what is compared with `expected`.
        expected: the right answer; None where the rule is another one.
        bytes: logits that must be read once.
    """

    run: Callable[[], Outputs]
    answer: Callable[[Outputs], torch.Tensor]
    expected: torch.Tensor | None
    bytes: int

    def check(self, name: str, shape: Shape, call: Callable[[], Outputs] | None = None) -> None:
        """Compares the answer of a call, `run` by default, after the outputs were poisoned.

        An allocated output is poisoned too as far as the allocator gives the same memory out again,
        and always under a graph.

        Raises:
            MismatchError: the answers differ.
        """
        call = call or self.run
        for output in call():
            if output is not None:
                if output.dtype == torch.bool:
                    # -7 would be True, which can be right; the opposite of the answer cannot.
                    output.logical_not_()
                else:
                    output.fill_(-7)
        answer = self.answer(call())
        if self.expected is not None and not torch.equal(answer, self.expected):
            wrong = (answer != self.expected).flatten(1).any(1).nonzero().flatten().tolist()
            raise MismatchError(
                f"{name} is wrong at {shape}: {len(wrong)} of {len(answer)} requests differ from "
                f"the reference, the first is request {wrong[0]}."
            )


def _all_fields(outputs: Outputs) -> torch.Tensor:
    """Token ids, accepted and relaxed counts of a `VerifyOutput`, side by side."""
    tokens, accepted, relaxed = outputs[:3]
    return torch.cat([tokens.int(), accepted[:, None], relaxed[:, None]], 1)


def _only(outputs: Outputs) -> torch.Tensor:
    """The single output, token ids as int32."""
    (found,) = outputs
    return found if found.dtype == torch.bool else found.int()  # type: ignore[no-any-return]


def mars(step: Step, theta: float | torch.Tensor = THETA) -> Variant:
    """The Triton kernels, as the V1 sampler calls them, with the outputs' buffers given."""
    call = step.verify(theta)
    out = call(backend="triton")
    return Variant(
        run=functools.partial(call, backend="triton", out=out),
        answer=_all_fields,
        expected=_all_fields(call(backend="torch")),
        bytes=step.shape.logits_bytes,
    )


def one_theta_each(step: Step) -> torch.Tensor:
    """`[batch]`, a theta for each request."""
    return torch.full((step.shape.batch,), THETA, device=step.logits.device)


def mars_v2(step: Step) -> Variant:
    """The Triton kernels as the V2 sampler calls them: rows in order, input tokens as drafts."""
    batch, k, _, _ = step.shape
    call = functools.partial(
        verify_drafts,
        Drafts(
            step.logits,
            step.input_tokens,
            torch.arange(1, batch + 1, device=step.logits.device, dtype=torch.int32) * (k + 1),
            max_draft_len=k,
            bonus_row_is_last=True,
        ),
        Margin(THETA, protected=step.protected),
    )
    return Variant(
        run=lambda: tuple(call(backend="triton")[:3]),
        answer=_all_fields,
        expected=_all_fields(step.verify(THETA)(backend="torch")),
        bytes=step.shape.logits_bytes,
    )


def mars_judge(step: Step) -> Variant:
    """The verdicts of the sampling branch; it reads the draft rows only."""
    if step.logits.dtype != torch.float32:
        raise NotApplicableError(
            "float32 only: sampled requests have processed logits of that dtype"
        )
    batch, k, vocab, _ = step.shape
    call = functools.partial(
        judge_drafts,
        Drafts(step.logits, step.drafts, step.ends, step.target_rows, max_draft_len=k),
        Margin(THETA, protected=step.protected),
    )
    return Variant(
        run=lambda: (call(backend="triton").verdicts,),
        answer=lambda outputs: _only(outputs).view(batch, k),
        expected=call(backend="torch").verdicts.view(batch, k),
        bytes=batch * k * vocab * 4,
    )


def torch_argmax(step: Step) -> Variant:
    """Strict verification in a few torch calls: one argmax over all rows, then small tensors."""
    batch, k = step.shape.batch, step.shape.k
    drafts = step.drafts.view(batch, k)
    offsets = torch.arange(k + 1, device=drafts.device)

    def run() -> Outputs:
        best = step.logits.argmax(-1).view(batch, k + 1)
        accepted = (best[:, :-1] == drafts).cumprod(1).sum(1, keepdim=True)
        return (best.masked_fill(offsets > accepted, -1),)

    return Variant(run, _only, step.strict, step.shape.logits_bytes)


def torch_topk(step: Step) -> Variant:
    """The whole rule in torch, with topk(2): this project's torch backend."""
    # As tensors: a Python number would be copied from the host, which no graph can hold.
    theta = one_theta_each(step)
    call = step.verify(theta, gap=torch.zeros_like(theta), backend="torch")
    return Variant(call, _all_fields, _all_fields(call()), step.shape.logits_bytes)


def v1_inputs(step: Step, temperature: float = 0.0, top_p: float | None = None) -> tuple[Any, Any]:
    """What the V1 model runner gives its rejection sampler beside the logits.

    Returns:
        `SpecDecodeMetadata`, and `SamplingMetadata` of requests that are all alike.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    batch, k, _, _ = step.shape
    device = step.logits.device
    metadata = SpecDecodeMetadata.make_dummy([[0] * k] * batch, device)
    metadata.draft_token_ids = step.drafts
    metadata.target_logits_indices = step.target_rows
    metadata.bonus_logits_indices = step.bonus_rows
    neutral = torch.zeros(batch, device=device)
    return metadata, SamplingMetadata(
        temperature=neutral + temperature if temperature else None,
        all_greedy=not temperature,
        all_random=bool(temperature),
        top_p=None if top_p is None else neutral + top_p,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=neutral,
        presence_penalties=neutral,
        repetition_penalties=neutral,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def fly_options(step: Step, rejection_sample: Callable[..., Any]) -> dict[str, Any]:
    """FLy's options at their defaults in vLLM 0.33; its rule is lossy and has no reference here."""
    if "fly_window_size" not in inspect.signature(rejection_sample).parameters:
        raise NotApplicableError("this vLLM has no FLy verification; 0.33 is the first that does")
    return {
        "fly_window_size": min(6, step.shape.k - 1),
        "fly_entropy_threshold": 0.3,
        "fly_entropy_top_k": 3,
    }


def vllm_v1(step: Step, fly: bool = False) -> Variant:
    """`RejectionSampler.forward` of vLLM's V1 model runner, all requests greedy."""
    # Greedy requests never reach FlashInfer's sampler; without it nothing is compiled for it.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.sample.rejection_sampler import RejectionSampler, rejection_sample
    from vllm.v1.sample.sampler import Sampler

    device = step.logits.device
    config: SimpleNamespace | None = None
    if device.type == "cpu":
        current_platform.import_kernels()
        if not HAS_TRITON:
            current_platform.register_triton_kernel_overrides()
    if fly:
        options = fly_options(step, rejection_sample)
        config = SimpleNamespace(rejection_sample_method="fly", **options)
    sampler = RejectionSampler(Sampler(), config, device)
    metadata, sampling = v1_inputs(step)
    return Variant(
        run=lambda: (sampler(metadata, None, step.logits, sampling).sampled_token_ids,),
        answer=_only,
        expected=None if fly else step.strict,
        bytes=step.shape.logits_bytes,
    )


def vllm_v2(step: Step, fly: bool = False, **options: Any) -> Variant:
    """`rejection_sample` of vLLM's Model Runner V2, all requests greedy.

    That runner's sampler hands logits that need no processing to it as they are.
    """
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    if fly:
        options |= fly_options(step, rejection_sample)
    batch, k, _, _ = step.shape
    device = step.logits.device
    requests = torch.arange(batch, device=device, dtype=torch.int32)
    offsets = torch.arange(k + 1, device=device, dtype=torch.int32)

    def answer(outputs: Outputs) -> torch.Tensor:
        tokens, num_tokens = outputs
        return tokens.masked_fill(offsets >= num_tokens[:, None], -1).int()  # type: ignore[no-any-return]

    return Variant(
        run=functools.partial(
            rejection_sample,
            step.logits,
            None,
            step.input_tokens,
            torch.arange(batch + 1, device=device, dtype=torch.int32) * (k + 1),
            offsets.long().repeat(batch),
            requests,
            requests.repeat_interleave(k + 1),
            offsets.repeat(batch),
            torch.zeros(batch, device=device),
            torch.zeros(batch, device=device, dtype=torch.int64),
            k,
            **options,
        ),
        answer=answer,
        expected=None if fly else step.strict,
        bytes=step.shape.logits_bytes,
    )


def empty(step: Step) -> Variant:
    """A kernel on one element: the least that this way of timing shows."""
    element = torch.zeros(1, 1, device=step.logits.device)
    return Variant(lambda: (element.add_(1),), _only, None, 0)


OURS: dict[str, Callable[[Step], Variant]] = {
    "mars": mars,
    "mars, theta per request": lambda step: mars(step, one_theta_each(step)),
    "mars, V2 layout": mars_v2,
    "mars judge_positions": mars_judge,
    "empty kernel": empty,
}
BASELINES: dict[str, Callable[[Step], Variant]] = {
    "torch argmax, strict": torch_argmax,
    "torch topk(2), whole rule": torch_topk,
    "vLLM V1, strict": vllm_v1,
    "vLLM V1, fly": functools.partial(vllm_v1, fly=True),
    "vLLM V2, strict": vllm_v2,
    "vLLM V2, block": functools.partial(vllm_v2, use_block_verification=True),
    "vLLM V2, fly": functools.partial(vllm_v2, fly=True),
}


def build(step: Step) -> tuple[dict[str, Variant], dict[str, str]]:
    """All variants of a step, checked, and for each one that cannot run the reason.

    Raises:
        MismatchError: a variant gave other tokens than the reference.
    """
    variants: dict[str, Variant] = {}
    skipped: dict[str, str] = {}
    for name, make in {**OURS, **BASELINES}.items():
        try:
            variant = make(step)
            variant.check(name, step.shape)
        except NotApplicableError as reason:
            skipped[name] = str(reason)
        except Exception as error:
            # An installed vLLM may fail in any way, and the others are still worth timing.
            if isinstance(error, MismatchError) or not name.startswith("vLLM"):
                raise
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            variants[name] = variant
    at_theta_1 = mars(step, 1.0)
    at_theta_1.expected, at_theta_1.answer = step.strict, lambda outputs: _only(outputs[:1])
    at_theta_1.check("mars at theta 1", step.shape)
    return variants, skipped
