"""A step that is replayed does what it does without a graph.

The graphs are vLLM's own but for CUDA's part: what was called while a graph was captured, torch's
operations and launches, is called again, on the same tensors.
"""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# vLLM's CPU worker puts its stand-ins for pinned memory and streams in place, before the V2 modules
# take them.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import cudagraph_utils, model_runner
from vllm.v1.worker.gpu.input_batch import InputBuffers

from benchmarks.kernel_step import Shape, step_of
from benchmarks.runner_v2 import RunnerV2
from vllm_mars import MarsConfig
from vllm_mars.kernels import launch
from vllm_mars.options.cuda_graph import GRAPH_VARIABLE

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)"),
]

CPU = torch.device("cpu")
BATCH, K, VOCAB = 6, 2, 97
CONFIG = MarsConfig(max_loss=0.5, strict_opening=0, strict_spans=((5, 6),))
KINDS = {"greedy": (0.0, False), "fixed": (1.0, False), "drawn": (1.0, True)}


class Graph(TorchDispatchMode):
    """Stands in for a CUDA graph; as a context it captures."""

    replays = 0
    capturing = None

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, result))
        return result

    def __enter__(self):
        Graph.capturing = self
        return super().__enter__()

    def __exit__(self, *error):
        Graph.capturing = None
        super().__exit__(*error)

    def replay(self):
        """The same calls, whose results lie where they lay."""
        Graph.replays += 1
        for function, args, kwargs, result in self._calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def note(self, *call):
        """Launches, and notes a launch."""
        self._calls.append((*call, None))
        function, args, options = call
        with _disable_current_modes():
            function(*args, **options)


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    launched, platform = launch.Variant.launch, cudagraph_utils.current_platform

    def noted(*args, **options):
        if Graph.capturing:
            Graph.capturing.note(launched, args, options)
        else:
            launched(*args, **options)

    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(launch.Variant, "launch", noted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: graph)
    monkeypatch.setattr(platform, "get_global_graph_pool", lambda: None, raising=False)
    for name, value in {
        "get_pp_group": lambda: rank,
        "graph_capture": lambda device: nullcontext(),
        "capture_pool": lambda pool, config: nullcontext(pool),
        "is_global_first_rank": lambda: False,
        "current_stream": lambda: None,
    }.items():
        monkeypatch.setattr(cudagraph_utils, name, value)


class Runner(RunnerV2):
    """With vLLM's own `sample`, and as much more of its runner as a graph meets.

    Args:
        kind: a key of KINDS.
        params: a `SamplingParams` for each request; default: by the kind.
    """

    sample = model_runner.GPUModelRunner.sample
    lora_config = batch_sharder = adaptive_verification = None
    max_num_reqs, decode_query_len = BATCH, K + 1

    def __init__(self, kind, params=None):
        rows = BATCH * (K + 1)
        self.is_drawn = KINDS[kind][1]
        self.hidden_states = torch.zeros(rows, VOCAB, dtype=torch.bfloat16)
        self.cudagraph_manager = SimpleNamespace(hidden_states=self.hidden_states)
        self.input_buffers = InputBuffers(BATCH, rows, CPU)
        self.model_state = SimpleNamespace(capture_inner_cudagraphs=lambda: None)
        # A head that gives what it is given, somewhere else.
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden * 1)
        super().__init__(step_of(Shape(*KINDS[kind], BATCH, K, VOCAB), CPU, params), CONFIG)
        self.vllm_config = VllmConfig()
        self.vllm_config.scheduler_config.max_num_seqs = BATCH
        self.vllm_config.compilation_config.cudagraph_capture_sizes = [6, 18]
        self.vllm_config.compilation_config.max_cudagraph_capture_size = 18

    @torch.inference_mode()
    def capture_model(self, *, profile_only=False):
        """As vLLM's calls what is captured behind the target."""
        self.model_state.capture_inner_cudagraphs()
        return 0

    def sample_tokens(self, grammar_output):
        """With whatever `decode` has put there."""
        self.sampled, *_ = self.sample(*self.given, grammar_output)

    @torch.inference_mode()
    def decode(self, seed, names, drafts=K, finished=(), hidden=None, grammar=None, **others):
        """A step of some requests; what it emits, and all that is kept and counted of them.

        Args:
            seed: of logits and drafts.
            names: of the requests, in their order.
            drafts: of each.
            finished: names of requests that have ended; others with the same names come.
            hidden: where the target leaves its hidden states; default: vLLM's buffer.
            grammar: the output of vLLM's grammar.
            others: of the `InputBatch`.
        """
        self.execute_model(scheduled(finished))
        batch, rows = len(names), len(names) * (drafts + 1)
        states, numbers = self.req_states, torch.Generator().manual_seed(seed)
        slots = torch.tensor([states.req_id_to_index[name] for name in names])
        logits = torch.randn(rows, VOCAB, generator=numbers).bfloat16() * 3
        # The target's first, second or third choice at the row before.
        rank = torch.randint(3, (rows, 1), generator=numbers)
        inputs = logits.topk(3).indices.gather(1, rank)[:, 0].roll(1).int()
        if self.is_drawn:
            own = logits.view(batch, drafts + 1, VOCAB)[:, :-1]
            self.speculator.draft_logits[slots, :drafts] = own + own.roll(1, 1) / 4
        hidden = self.hidden_states if hidden is None else hidden
        hidden[:rows] = logits
        # Behind them stands what the graph of a larger batch left.
        hidden[rows:] = float("nan")
        offsets = torch.arange(drafts + 1)
        pos = (states.total_len.gpu[slots].long()[:, None] + offsets).flatten()
        self.input_buffers.input_ids[:rows], self.input_buffers.positions[:rows] = inputs, pos
        ends = np.arange(batch + 1, dtype=np.int32) * (drafts + 1)
        full = self._step.batch()
        self.given = (
            hidden,
            dataclasses.replace(
                full,
                req_ids=names,
                num_reqs=batch,
                idx_mapping=slots,
                idx_mapping_np=slots.numpy(),
                expanded_idx_mapping=slots.repeat_interleave(drafts + 1),
                expanded_local_pos=offsets.repeat(batch).int(),
                num_tokens=rows,
                num_draft_tokens=batch * drafts,
                seq_lens=full.seq_lens[:batch],
                seq_lens_cpu_upper_bound=full.seq_lens_cpu_upper_bound[:batch],
                input_ids=self.input_buffers.input_ids[:rows],
                positions=self.input_buffers.positions[:rows],
                logits_indices=torch.arange(rows),
                cu_num_logits=torch.from_numpy(ends),
                cu_num_logits_np=ends,
                **{"has_prefill": False, **others},
            ),
        )
        self.sample_tokens(grammar)
        # The next replay writes over what this one has given nobody.
        emitted, counts = self.sampled.sampled_token_ids, self.sampled.num_sampled.tolist()
        tokens = [row[:count] for row, count in zip(emitted.tolist(), counts, strict=True)]
        for slot, row in zip(slots.tolist(), tokens, strict=True):
            total = int(states.total_len.gpu[slot])
            states.all_token_ids.gpu[slot, total : total + len(row)] = torch.tensor(row)
            states.total_len.gpu[slot] += len(row)
        sampler = self.rejection_sampler
        counted = sampler.reports.counters.device_counts
        drawn = [each.tolist() for each in sampler.requests.drawn_with] if self.is_drawn else []
        kept = sampler.requests.records.table.tolist(), counted.tolist(), drawn
        return emitted, tokens, self.sampled.num_rejected.tolist(), kept


def scheduled(finished):
    return SimpleNamespace(finished_req_ids={*finished}, preempted_req_ids=None)


@pytest.fixture
def runners(monkeypatch):
    """Makes a runner with graphs, and one without."""

    def made(*args):
        plain = Runner(*args)
        monkeypatch.setenv(GRAPH_VARIABLE, "1")
        graphs = Runner(*args)
        graphs.capture_model()
        return graphs, plain

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_does_what_a_step_does(runners, kind):
    both = runners(kind)
    steps = [
        {"names": ["0", "1", "2", "3", "4", "5"]},
        # In the graph of two, and in that of six, behind the slots of the first step.
        {"names": ["2"]},
        {"names": ["3", "0", "1"]},
        {"names": ["1", "3", "2"], "finished": ["1"]},
        {"names": ["1", "2"]},
    ]
    held = []
    for seed, step in enumerate(steps):
        for runner in both:
            # Those that come have other seeds.
            heat = {"temperature": KINDS[kind][0], "max_tokens": 900}
            for i, request in enumerate(runner._step.requests):
                request.sampling = SamplingParams(seed=100 * seed + i, **heat)
        (emitted, *replayed), (_, *plain) = (runner.decode(seed, **step) for runner in both)
        assert replayed == plain
        held.append((emitted, emitted.clone()))
    assert Graph.replays == len(steps)
    # vLLM copies what a step emits while the next one runs.
    assert all(torch.equal(now, then) for now, then in held)
    # Something has been lost, so that it is seen.
    assert both[0].rejection_sampler.requests.records.lost.any()


def test_a_step_that_samples_behind_a_greedy_one(runners):
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=900) for i in range(BATCH)]
    both = runners("fixed", params)
    for seed, names in enumerate((["0", "2"], ["0", "1"], ["2"])):
        (_, *replayed), (_, *plain) = (runner.decode(seed, names) for runner in both)
        assert replayed == plain
    assert Graph.replays == 3


ASKED = {
    "top-k": {"top_k": 5},
    "a penalty": {"presence_penalty": 0.5},
    "a bias": {"logit_bias": {3: -5.0}},
    "logprobs": {"logprobs": 1},
    "a report": {"extra_args": {"mars_return": True}},
}


def test_a_request_that_asks_for_more_is_verified_as_before(runners):
    asked = [{}, *ASKED.values()]
    own = {"temperature": 1, "max_tokens": 900}
    both = runners("fixed", [SamplingParams(seed=i, **own, **it) for i, it in enumerate(asked)])
    for number, what in enumerate(ASKED):
        names = ["0", str(number + 1)]
        (_, *replayed), (_, *plain) = (runner.decode(number, names) for runner in both)
        assert replayed == plain
        assert Graph.replays == 0, what
    both[0].decode(9, ["0"])
    assert Graph.replays == 1


@pytest.mark.parametrize("case", ["a prompt", "shorter drafts", "no graph of the target"])
def test_a_step_that_is_not_plain_is_verified_as_before(runners, case):
    both = runners("fixed")
    for runner in both:
        other = {
            "a prompt": {"has_prefill": True},
            "shorter drafts": {"drafts": 1},
            "no graph of the target": {"hidden": runner.hidden_states.clone()},
        }[case]
        runner.found = runner.decode(7, ["0", "3"], **other)[1:]
    assert both[0].found == both[1].found
    assert Graph.replays == 0


def test_a_grammar_is_verified_as_before(monkeypatch, runners):
    monkeypatch.setattr(model_runner, "grammar_invalid_drafts", lambda *given: None)
    both, grammar = runners("greedy"), SimpleNamespace()
    grammar.structured_output_request_ids = grammar.num_acceptable_drafts = ["0"]
    grammar.grammar_bitmask = None
    for runner in both:
        masks = SimpleNamespace(
            apply_grammar_bitmask=lambda logits, *given: logits[:, 9:].fill_(-9)
        )
        runner.structured_outputs_worker = masks
        runner.found = runner.decode(7, ["0", "3"], grammar=grammar)[1:]
    assert both[0].found == both[1].found
    assert Graph.replays == 0


NOT_CAPTURED = {
    "lora_config": True,
    "batch_sharder": True,
    "adaptive_verification": True,
    "decode_query_len": K + 2,
    "cudagraph_manager": SimpleNamespace(hidden_states=None),
}


def test_what_changes_the_head_or_the_batch_is_not_captured(monkeypatch, runners):
    graphs, _ = runners("greedy")
    for seed, name in enumerate(NOT_CAPTURED):
        with monkeypatch.context() as patch:
            patch.setattr(graphs, name, NOT_CAPTURED[name])
            graphs.capture_model()
        graphs.decode(seed, ["0", "1"])
        assert Graph.replays == 0, name


def test_what_was_captured_to_measure_memory_or_of_another_model_is_dropped(runners):
    graphs, _ = runners("greedy")
    graphs.capture_model(profile_only=True)
    graphs.decode(1, ["0", "1"])
    graphs.capture_model()
    graphs.reload()
    graphs.decode(2, ["0", "1"])
    assert Graph.replays == 0
    graphs.capture_model()
    graphs.decode(3, ["0", "1"])
    assert Graph.replays == 1


def test_an_unknown_value_is_refused(monkeypatch):
    monkeypatch.setenv(GRAPH_VARIABLE, "yes")
    with pytest.raises(ValueError, match="VLLM_MARS_CUDA_GRAPH='yes' is neither 1 .* nor 0; unset"):
        Runner("greedy")
