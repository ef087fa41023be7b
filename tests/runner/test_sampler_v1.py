"""The V1 sampler beside vLLM's own: the same tokens at theta = 1, the rule below it."""

import dataclasses
import itertools

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

import oracle
from vllm_mars import MarsConfig, MarsRejectionSampler
from vllm_mars.runner import sampler_v1
from vllm_mars.runner.counters import CounterLayout, Counters
from vllm_mars.runner.requests_v1 import RequestsV1
from vllm_mars.runner.verification import Verification

pytestmark = pytest.mark.usefixtures("mended_kernels")

CPU = torch.device("cpu")
VOCAB = 97
LENGTHS = [3, 0, 5, 1]


def mars_sampler(config, protected=(), logprobs_mode="raw_logprobs"):
    counters = Counters(CounterLayout(5, config.shadow, config.rule), CPU)
    verification = Verification(config, list(protected), counters)
    # In these tests nobody enters the batch, so each place holds what the server's options say.
    requests = RequestsV1(config, 20_000, CPU)
    return MarsRejectionSampler(Sampler(logprobs_mode), None, CPU, verification, requests)


def sampling(temperatures, *, seeds=None, output=None, drafts=None, **changes):
    """SamplingMetadata of one request for each temperature; 0 is greedy."""
    batch = len(temperatures)
    generators = {}
    for i, seed in enumerate(seeds or []):
        if seed is not None:
            generators[i] = torch.Generator().manual_seed(seed)
    greedy = [temperature == 0 for temperature in temperatures]
    penalties = {
        name: torch.tensor(changes.pop(name, [neutral] * batch))
        for name, neutral in (
            ("frequency_penalties", 0.0),
            ("presence_penalties", 0.0),
            ("repetition_penalties", 1.0),
        )
    }
    given = {
        "temperature": None if all(greedy) else torch.tensor(temperatures),
        "all_greedy": all(greedy),
        "all_random": not any(greedy),
        "top_p": None,
        "top_k": None,
        "generators": generators,
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "output_token_ids": output or [[] for _ in temperatures],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
        "spec_token_ids": drafts,
    }
    return SamplingMetadata(**{**given, **penalties, **changes})


def metadata_of(drafts):
    """The metadata of a step in which each request's draft rows precede its bonus row."""
    metadata = SpecDecodeMetadata.make_dummy(drafts, CPU)
    is_bonus = torch.cat([torch.arange(len(d) + 1) == len(d) for d in drafts])
    metadata.logits_indices = torch.arange(len(is_bonus), dtype=torch.int32)
    metadata.bonus_logits_indices = is_bonus.nonzero().squeeze(1).int()
    metadata.target_logits_indices = (~is_bonus).nonzero().squeeze(1).int()
    return metadata


def step(seed, lengths=LENGTHS, vocab=VOCAB, near=0.9, dtype=torch.float32):
    """Random logits and drafts; a share `near` of the drafts is among the target's first three."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths) + len(lengths)
    logits = (torch.randn(rows, vocab, generator=generator) * 3 + 2).to(dtype)
    metadata = metadata_of([[0] * n for n in lengths])
    target = logits[metadata.target_logits_indices]
    best = target.topk(3, dim=-1).indices
    rank = torch.randint(0, 3, (len(target), 1), generator=generator)
    drafts = best.gather(1, rank).squeeze(1)
    elsewhere = torch.rand(len(target), generator=generator) > near
    drafts[elsewhere] = torch.randint(-1, vocab, (int(elsewhere.sum()),), generator=generator)
    metadata.draft_token_ids = drafts.int()
    return metadata, logits


def drafts_of(metadata):
    return [part.tolist() for part in metadata.draft_token_ids.split(metadata.num_draft_tokens)]


def probabilities(seed, rows, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(rows, vocab, generator=generator) * 2, dim=-1)


GREEDY = [0.0] * 4
SAMPLED = [0.7, 1.0, 1.3, 0.2]
MIXED = [0.0, 1.0, 0.8, 0.0]
SEEDS = [1, 2, None, 4]

SETTINGS = {
    "greedy": (GREEDY, {}),
    "sampled": (SAMPLED, {}),
    "mixed": (MIXED, {}),
    "top-k and top-p": (
        SAMPLED,
        {"top_k": torch.tensor([2, 5, 97, 1]), "top_p": torch.tensor([0.9, 0.5, 1.0, 0.7])},
    ),
    "mixed with top-p": (MIXED, {"top_p": torch.tensor([1.0, 0.5, 0.9, 1.0])}),
    "logprobs": (GREEDY, {"max_num_logprobs": 3}),
    "sampled logprobs": (MIXED, {"max_num_logprobs": 2}),
    "bad words": (GREEDY, {"bad_words_token_ids": {0: [[5], [7, 8]], 2: [[11]]}}),
    "allowed tokens": (
        MIXED,
        {"allowed_token_ids_mask": (torch.arange(4 * VOCAB) % 3 == 0).reshape(4, VOCAB)},
    ),
    "penalties": (
        MIXED,
        {
            "no_penalties": False,
            "prompt_token_ids": torch.arange(8).reshape(4, 2),
            "output": [[1, 2], [3], [4, 4, 4], [9]],
            "frequency_penalties": [0.5, 0.0, 1.0, 0.2],
            "presence_penalties": [0.1, 0.3, 0.0, 0.0],
            "repetition_penalties": [1.2, 1.0, 1.5, 1.1],
        },
    ),
}


def both(setting, seed, config, *, draft_probs=False, logprobs_mode="raw_logprobs", protected=()):
    """Runs vLLM's sampler and ours on one step with the same random numbers."""
    temperatures, changes = SETTINGS[setting]
    outputs = []
    for sampler in (
        RejectionSampler(Sampler(logprobs_mode), None, CPU),
        mars_sampler(config, protected, logprobs_mode),
    ):
        metadata, logits = step(seed)
        meta = sampling(temperatures, seeds=SEEDS, drafts=drafts_of(metadata), **changes)
        torch.manual_seed(seed)
        probs = probabilities(seed, sum(LENGTHS)) if draft_probs else None
        outputs.append(sampler(metadata, probs, logits, meta))
    return outputs


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("config", [MarsConfig(theta=1.0), MarsConfig(gap=0), MarsConfig(price=0)])
def test_theta_1_is_vllm(config, setting, draft_probs, logprobs_mode):
    for seed in range(8):
        own, mars = both(
            setting, seed, config, draft_probs=draft_probs, logprobs_mode=logprobs_mode
        )
        assert torch.equal(own.sampled_token_ids, mars.sampled_token_ids)
        assert own.sampled_token_ids.dtype == mars.sampled_token_ids.dtype
        if own.logprobs_tensors is None:
            assert mars.logprobs_tensors is None
            continue
        for field in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            assert torch.equal(
                getattr(own.logprobs_tensors, field), getattr(mars.logprobs_tensors, field)
            ), field


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("config", [MarsConfig(theta=0.5), MarsConfig(price=0.5)])
def test_relaxed_accepts_more(config, setting):
    strict_total = relaxed_total = 0
    for seed in range(20):
        own, mars = both(setting, seed, config)
        strict = (own.sampled_token_ids != -1).sum(1)
        relaxed = (mars.sampled_token_ids != -1).sum(1)
        assert (relaxed >= strict).all()
        strict_total += int(strict.sum())
        relaxed_total += int(relaxed.sum())
    assert relaxed_total > strict_total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("config", [MarsConfig(theta=0.8), MarsConfig(price=1.5)])
def test_greedy_follows_the_rule(config, processed, dtype):
    """Raw rows and vLLM's path with the relaxed drafts made certain give the oracle's tokens."""
    protected = frozenset({3, 50})
    sampler = mars_sampler(config, protected)
    values = {config.rule: config.value}
    for seed in range(30):
        metadata, logits = step(seed, dtype=dtype)
        changes = {"max_num_logprobs": 0} if processed else {}
        meta = sampling(GREEDY, drafts=drafts_of(metadata), **changes)
        assert sampler_v1.takes_raw_logits(meta) is not processed
        rows, bonus = metadata.target_logits_indices, metadata.bonus_logits_indices
        target = logits[rows].float().split(LENGTHS)
        expected = [
            oracle.verify(
                part.tolist(),
                drafts,
                int(last),
                values.get("theta", 1.0),
                values.get("gap", 0.0),
                protected,
                price=values.get("price"),
            ).tokens
            for part, drafts, last in zip(
                target, drafts_of(metadata), logits[bonus].argmax(-1), strict=True
            )
        ]
        output = sampler(metadata, None, logits, meta).sampled_token_ids.tolist()
        assert [[token for token in row if token != -1] for row in output] == expected


@pytest.mark.parametrize("config", [MarsConfig(theta=0.8), MarsConfig(price=1.5)])
def test_greedy_requests_get_the_same_beside_one_that_samples(config):
    for seed in range(30):
        metadata, logits = step(seed)
        alone, beside = (
            mars_sampler(config)(
                metadata, None, logits.clone(), sampling([0.0] * 3 + [last], drafts=None)
            ).sampled_token_ids[:3]
            for last in (0.0, 1.0)
        )
        assert torch.equal(alone, beside)


def test_a_first_choice_counts_as_relaxed_only_where_a_draw_was_spared():
    metadata = metadata_of([[1], [1]])
    logits = torch.tensor([[1.9, 2.0, 0.5, 0.0]]).repeat(4, 1)
    for temperatures, relaxed in (([0.0, 0.0], 0), ([0.0, 1.0], 1)):
        sampler = mars_sampler(MarsConfig(theta=0.5))
        sampler(metadata, None, logits.clone(), sampling(temperatures, drafts=[[1], [1]]))
        counters = sampler.verification.counters
        counts, layout = counters.take_delta(), counters.layout
        assert counts[layout.accepted][0] == 2
        assert counts[layout.relaxed][0] == relaxed


@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize("price", [0.0, 0.5])
def test_only_a_price_is_refused(price, draft_probs):
    metadata, logits = step(1)
    sampler = mars_sampler(MarsConfig(price=price), range(VOCAB))
    probs = probabilities(1, sum(LENGTHS)) if draft_probs else None
    sampler(metadata, probs, logits, sampling(MIXED, drafts=drafts_of(metadata)))
    counters = sampler.verification.counters
    counts, layout = counters.take_delta(), counters.layout
    assert sum(counts[layout.verified]) > 0
    assert any(counts[layout.refused]) == (price > 0)


def test_logprobs_of_a_relaxed_token_are_its_own():
    logits = torch.tensor([[1.9, 2.0, 0.5, 0.0], [0.0, 3.0, 0.0, 0.0]])
    metadata = metadata_of([[0]])
    for mode, temperature in itertools.product(("raw_logprobs", "processed_logprobs"), (0.0, 0.5)):
        meta = sampling([temperature], drafts=[[0]], max_num_logprobs=2)
        sampler = mars_sampler(MarsConfig(theta=0.9), logprobs_mode=mode)
        output = sampler(metadata, None, logits.clone(), meta)
        assert output.sampled_token_ids[0, 0] == 0
        scale = temperature if mode == "processed_logprobs" and temperature else 1.0
        expected = (logits[0] / scale).log_softmax(-1)
        assert output.logprobs_tensors.logprob_token_ids[0].tolist() == [0, 1, 0]
        torch.testing.assert_close(
            output.logprobs_tensors.logprobs[0], expected[torch.tensor([0, 1, 0])]
        )
        assert output.logprobs_tensors.selected_token_ranks[0] == 2


MASKS = (
    {"bad_words_token_ids": {0: [[0]]}},
    {"allowed_token_ids_mask": torch.tensor([[True, False, False, False]])},
)
# Greedy requests carry neither.
CUTS = ({"top_k": torch.tensor([1])}, {"top_p": torch.tensor([0.3])})


@pytest.mark.parametrize(
    ("temperature", "changes"),
    [*((0.0, mask) for mask in MASKS), *((1.0, change) for change in MASKS + CUTS)],
)
def test_a_forbidden_draft_is_never_accepted(temperature, changes):
    logits = torch.tensor([[1.99, 2.0, 1.0, 0.9], [0.0, 3.0, 0.0, 0.0]])
    metadata = metadata_of([[0]])
    sampler = mars_sampler(MarsConfig(theta=0.01))
    for seed in range(50):
        torch.manual_seed(seed)
        meta = sampling([temperature], drafts=[[0]], **changes)
        output = sampler(metadata, None, logits.clone(), meta)
        assert output.sampled_token_ids[0, 0] != 0


def test_padding_is_rejected_in_sampling():
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 9.0, 0.0]])
    metadata = metadata_of([[0]])
    metadata.draft_token_ids = torch.tensor([-1], dtype=torch.int32)
    output = mars_sampler(MarsConfig())(metadata, None, logits, sampling([1.0], drafts=[[-1]]))
    assert output.sampled_token_ids[0, 1] == -1
    assert 0 <= output.sampled_token_ids[0, 0] < 3


def test_raw_logits_are_taken_only_when_nothing_touches_them():
    plain = sampling(GREEDY)
    assert sampler_v1.takes_raw_logits(plain)
    for field, value in (
        ("all_greedy", False),
        ("max_num_logprobs", 0),
        ("logprob_token_ids", {0: [1]}),
        ("no_penalties", False),
        ("allowed_token_ids_mask", torch.zeros(4, VOCAB, dtype=torch.bool)),
        ("bad_words_token_ids", {0: [[1]]}),
    ):
        assert not sampler_v1.takes_raw_logits(dataclasses.replace(plain, **{field: value})), field


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_num_logprobs", [None, 2])
def test_a_step_without_any_draft(temperature, max_num_logprobs):
    logits = torch.tensor([[0.0, 9.0, 0.0], [20.0, 9.0, 0.0]])
    metadata = metadata_of([[], []])
    top_k = torch.tensor([1, 2]) if temperature else None
    meta = sampling([temperature] * 2, top_k=top_k, max_num_logprobs=max_num_logprobs)
    output = mars_sampler(MarsConfig())(metadata, None, logits, meta)
    assert output.sampled_token_ids.tolist() == [[1], [0]]
    assert (output.logprobs_tensors is None) == (max_num_logprobs is None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_protection(temperature):
    """A small margin accepts the draft, unless it or the argmax is protected: then it is strict."""
    count = 200
    logits = torch.tensor([[30.0, 31.0, 0.0]]).repeat(2 * count, 1)
    metadata = metadata_of([[0]] * count)
    torch.manual_seed(0)
    strict_share = 0.0 if temperature == 0 else float(torch.sigmoid(torch.tensor(-1.0)))
    for protected, share in (([], 1.0), ([2], 1.0), ([0], strict_share), ([1], strict_share)):
        output = mars_sampler(MarsConfig(theta=0.9), protected)(
            metadata, None, logits.clone(), sampling([temperature] * count, drafts=[[0]] * count)
        )
        accepted = (output.sampled_token_ids[:, 0] == 0).float().mean()
        assert accepted == share if share in (0.0, 1.0) else abs(accepted - share) < 0.1
