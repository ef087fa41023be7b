"""The verification of one step of Model Runner V2, and clocks, for `kernel` and `launches`."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from triton.testing import do_bench

# Of each request: tokens of its prompt, output tokens, and how many kinds of these there are, so
# that the guard against repetition finds some again.
PROMPT_LEN, ANSWER, KINDS = 2, 512, 1_000
MAX_MODEL_LEN = 2 * ANSWER
# Newton's method takes so many steps for a row of a price between 0.1 and 1, on average.
NEWTON_STEPS = 2
# The wait of the device while the host launches, in cycles: 2 ms at 2 GHz.
WAIT_CYCLES = 4_000_000
Name = TypeVar("Name")
Call = Callable[[], Any]
# The processed logits, the tokens `[batch, k + 1]` and how many of them count.
Verify = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Shape(NamedTuple):
    """A batch whose requests have `k` draft tokens each, and bfloat16 logits."""

    temperature: float
    is_drawn: bool
    batch: int
    k: int
    vocab: int

    def __str__(self) -> str:
        drafts = "probabilistic" if self.is_drawn else "fixed"
        return f"temperature {self.temperature:g}, {drafts} drafts, batch {self.batch}"

    def rows_read(self) -> dict[str, int]:
        """Rows of logits that each kernel of vLLM and of MARS reads where all requests sample.

        None are written. Of a request's rows its bonus row is read where all drafts stay, in the
        place of another. The float32 copy that vLLM makes of the rows where a temperature is not 1,
        for itself and for MARS, is not in it.
        """
        rows = 1 + self.is_drawn
        of_drafts, of_requests = self.batch * self.k, self.batch
        behind_others = of_drafts - of_requests
        return {
            "_compute_local_logits_stats_kernel": of_drafts * rows,
            # By `block` alone: what may be rejected behind each draft token but the last.
            "_compute_local_residual_mass_kernel": behind_others * rows,
            "_resample_kernel": of_requests * rows,
            "rows_kernel": of_drafts,
            # The draft's, then both in each step of Newton's method.
            "clip_kernel": of_drafts * (1 + 2 * NEWTON_STEPS),
            "mass_kernel": behind_others * rows,
            "resample_kernel": of_requests * rows,
        }


class Step:
    """The inputs of one step, random and the same at each call.

    A request's rows are its draft rows and then its bonus row.

    Attributes:
        logits: `[batch * (k + 1), vocab]`.
        draft_logits: `[batch, k, vocab]`, near the target's, or None where drafts are fixed.
        inputs: `[batch * (k + 1)]` int32; a row's draft token is the input of the next row. It is
            drawn from the draft's logits, or the target's first choice with probability 0.6, else
            its second or third.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        _, is_drawn, batch, k, vocab = shape
        random = functools.partial(torch.rand, device=device)
        normal = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.shape, self.draft_logits = shape, None
        self.logits = normal(batch * (k + 1), vocab) * 3
        of_drafts = self.logits.view(batch, k + 1, vocab)[:, :-1]
        if is_drawn:
            self.draft_logits = of_drafts + normal(batch, k, vocab) / 2
            noise = -random(batch, k, vocab).log().neg().log()
            drafts = (self.draft_logits / (shape.temperature or 1) + noise).argmax(-1)
        else:
            rank = random(batch, k)
            rank = (rank > 0.6).long() + (rank > 0.85)
            drafts = of_drafts.topk(3).indices.gather(2, rank[..., None]).squeeze(2)
        inputs = drafts.new_zeros((batch, k + 1), dtype=torch.int32)
        inputs[:, 1:] = drafts
        self.inputs = inputs.flatten()

    @property
    def strict_method(self) -> str | None:
        """Which of vLLM's rejection sample methods a strict request is verified as.

        None for vLLM 0.32 by blocks: it compares with the same random numbers again in the next
        step, which MARS does not.
        """
        if self.draft_logits is None or not self.shape.temperature:
            return "standard"
        from vllm_mars.releases import draws_anew

        return "block" if draws_anew() else None

    def sampler(self, method: str, states: Any = None) -> Any:
        """vLLM's V2 rejection sampler, of one of its methods, for the slots of a `RequestState`."""
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
        from vllm.v1.worker.gpu.states import RequestState

        _, _, batch, k, vocab = self.shape
        device = self.logits.device
        states = states or RequestState(batch, MAX_MODEL_LEN, MAX_MODEL_LEN, k, vocab, device)
        sampler = Sampler(vllm_config(), batch, vocab, device, states, num_speculative_tokens=k)
        return RejectionSampler(sampler, self.spec_config(method), device)

    def spec_config(self, method: str) -> Any:
        """A speculative config of vLLM's, with its defaults and no draft model."""
        from vllm.config import SpeculativeConfig

        config: Any = SpeculativeConfig.__new__(SpeculativeConfig)
        config.method = "eagle3"
        config.num_speculative_tokens = self.shape.k
        config.rejection_sample_method = method
        config.draft_sample_method = "probabilistic" if self.shape.is_drawn else "greedy"
        return config

    def add_requests(
        self,
        sampler: Any,
        params: Sequence[Any] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Puts requests of the step into the slots of vLLM's V2 sampler.

        Args:
            sampler: of `sampler`.
            params: a `SamplingParams` for each request; default: the shape's temperature.
            names: which, by their numbers; default: all.
        """
        from vllm import SamplingParams

        states = sampler.req_states
        for name in names or map(str, range(self.shape.batch)):
            states.add_request(name, PROMPT_LEN, [5, 7], 0, MAX_MODEL_LEN)
            # Without a seed of its own a request gets a random one.
            own = SamplingParams(
                temperature=self.shape.temperature, seed=int(name), max_tokens=MAX_MODEL_LEN
            )
            chosen = own if params is None else params[int(name)]
            sampler.add_request(states.req_id_to_index[name], chosen)
        states.apply_staged_writes()
        sampler.apply_staged_writes()

    def answer(self, states: Any) -> None:
        """Gives the requests in all slots of vLLM's `RequestState` their output tokens."""
        _, _, batch, _, vocab = self.shape
        tokens = np.random.default_rng(0).integers(0, min(KINDS, vocab), (batch, ANSWER))
        length = PROMPT_LEN + ANSWER
        device = self.logits.device
        states.all_token_ids.gpu[:, PROMPT_LEN:length] = torch.from_numpy(tokens).to(device)
        states.total_len.gpu.fill_(length)

    def batch(self, sampler: Any) -> Any:
        """The `InputBatch` of the step, whose requests are in the slots of vLLM's V2 sampler."""
        from vllm.v1.worker.gpu.input_batch import InputBatch

        _, _, batch, k, _ = self.shape
        device, num_rows = self.logits.device, len(self.inputs)
        names = list(map(str, range(batch)))
        places = np.array([sampler.req_states.req_id_to_index[name] for name in names])
        slots = torch.as_tensor(places, dtype=torch.int32).to(device)
        offsets = torch.arange(k + 1, device=device, dtype=torch.int32)
        ends = np.arange(batch + 1, dtype=np.int32) * (k + 1)
        # vLLM takes drafts before the first sampled token for placeholders.
        begun = PROMPT_LEN + ANSWER
        lengths = torch.full((batch,), begun + k + 1, dtype=torch.int32)
        given = {
            "req_ids": names,
            "num_reqs": batch,
            "idx_mapping": slots,
            "idx_mapping_np": places,
            "expanded_idx_mapping": slots.repeat_interleave(k + 1, output_size=num_rows),
            "expanded_local_pos": offsets.repeat(batch),
            "num_tokens": num_rows,
            "num_draft_tokens": batch * k,
            "seq_lens": lengths.to(device),
            "seq_lens_cpu_upper_bound": lengths,
            "input_ids": self.inputs,
            "positions": offsets.long().repeat(batch) + begun,
            "logits_indices": torch.arange(num_rows, device=device),
            "cu_num_logits": torch.as_tensor(ends).to(device),
            "cu_num_logits_np": ends,
        }
        # A sampler reads nothing else of it.
        unused = {field.name: None for field in dataclasses.fields(InputBatch)}
        return InputBatch(**{**unused, **given})

    def verification(self, by: Any, params: Sequence[Any] | None = None) -> Verify:
        """What Model Runner V2 calls on the rows, of MARS or of vLLM.

        Args:
            by: a `MarsConfig`, or one of vLLM's rejection sample methods.
            params: see `add_requests`.
        """
        from vllm_mars import MarsRejectionSamplerV2
        from vllm_mars.report.counters import Counters
        from vllm_mars.report.worker import StepReports
        from vllm_mars.worker.engine_rule import EngineRule
        from vllm_mars.worker.requests_v2 import RequestsV2

        k, device = self.shape.k, self.logits.device
        verifier = self.sampler(by if isinstance(by, str) else "standard")
        sampler = verifier.sampler
        if not isinstance(by, str):
            requests = RequestsV2(by, sampler.req_states, is_drawn=self.shape.is_drawn)
            sampler.logits_processors.append(requests)
            mars = EngineRule(by, [2]), StepReports(Counters(k, device)), requests
            own = sampler, self.spec_config("standard"), device, *mars
            verifier = MarsRejectionSamplerV2(*own)
        self.add_requests(sampler, params)
        self.answer(sampler.req_states)
        batch = self.batch(sampler)
        return functools.partial(
            verifier._verify,
            self.logits,
            self.draft_logits,
            # vLLM passes slices, so these and the last are never the same object.
            self.inputs[:],
            batch.positions,
            batch.cu_num_logits,
            batch.idx_mapping,
            batch.idx_mapping_np,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
            self.inputs[:],
        )


@functools.cache
def vllm_config() -> Any:
    """One with vLLM's defaults."""
    from vllm.config import VllmConfig

    return VllmConfig()


def tokens_of(verify: Verify) -> torch.Tensor:
    """The tokens of one call, `[batch, k + 1]` with -1 behind the last of a request."""
    _, tokens, count = verify()
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.masked_fill(steps >= count[:, None], -1)


class HostClock:
    """Times calls on a CPU."""

    device, name = torch.device("cpu"), "cpu"

    def time(self, call: Call) -> tuple[float, float]:
        """Microseconds of one call, and those of them that the host needs."""
        begin = time.perf_counter()
        call()
        elapsed = (time.perf_counter() - begin) * 1e6
        return elapsed, elapsed

    def bandwidth(self) -> float:
        """GB/s of the memory; not measured here."""
        return 1.0


class ThreadClock(HostClock):
    """Times calls on a CPU by what their one thread runs, so that others do not count."""

    def time(self, call: Call) -> tuple[float, float]:
        """Microseconds of one call, twice."""
        begin = time.thread_time()
        call()
        elapsed = (time.thread_time() - begin) * 1e6
        return elapsed, elapsed


class GpuClock(HostClock):
    """Times calls on the stream of one GPU, each after a read of 4 times the L2 cache."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name = properties.name
        self._more_than_l2 = torch.zeros(properties.L2_cache_size, device=self.device)
        self._sink = torch.empty((), device=self.device)

    def time(self, call: Call) -> tuple[float, float]:
        """Microseconds on the stream, with a cold cache, and those that the host needs.

        The device waits until the host has launched all, as behind a model's forward pass.
        `triton.testing.do_bench` empties the cache by writes, which leaves lines that the cache
        must write back while the call is timed; this reads.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
        torch.sum(self._more_than_l2, 0, out=self._sink)
        begin.record()
        before = time.perf_counter()
        call()
        host = (time.perf_counter() - before) * 1e6
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3, host

    def bandwidth(self) -> float:
        """The better of reading 2 GB and of copying them, which reads and writes."""
        source = torch.rand(2**29, device=self.device)
        target = torch.empty_like(source)
        read, copied = (
            do_bench(call, return_mode="median")
            for call in (source.sum, lambda: target.copy_(source))
        )
        return float(max(source.nbytes / read, 2 * source.nbytes / copied) / 1e6)


def time_in_turn(
    clock: HostClock, calls: Mapping[Name, Call], rounds: int, warmup: int = 3
) -> dict[Name, list[tuple[float, float]]]:
    """Times the calls in turn, each round in another order; microseconds as the clock has them.

    A drift of the clock rate meets all of them, and none always follows the same other one.
    """
    names = list(calls)
    runs: dict[Name, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            elapsed = clock.time(calls[name])
            if number >= 0:
                runs[name].append(elapsed)
    return runs
