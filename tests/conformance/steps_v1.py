"""One verification step of the V1 model runner without an engine: vLLM's metadata and samplers."""

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_mars import MarsRejectionSampler
from vllm_mars.report.counters import Counters
from vllm_mars.report.worker import StepReports
from vllm_mars.worker.engine_params import LazyEngineParams
from vllm_mars.worker.requests_v1 import RequestsV1

CPU = torch.device("cpu")
VOCAB = 97
LENGTHS = [3, 0, 5, 1]


def mars_sampler(
    config, protected=(), logprobs_mode="raw_logprobs", longest=5, is_probabilistic=False
):
    engine_params = LazyEngineParams(config, list(protected))
    reports = StepReports(Counters(longest, CPU), config.logprobs == "sampled")
    # In these tests nobody enters the batch, so each place holds what the server's options say.
    requests = RequestsV1(config, 20_000, 20_000, is_probabilistic=is_probabilistic)
    return MarsRejectionSampler(Sampler(logprobs_mode), None, CPU, engine_params, reports, requests)


def sampling(temperatures, *, seeds=None, output=None, drafts=None, **changes):
    """SamplingMetadata of one request for each temperature; 0 is greedy."""
    batch = len(temperatures)
    generators = {
        i: torch.Generator().manual_seed(seed)
        for i, seed in enumerate(seeds or [])
        if seed is not None
    }
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


def step(seed, lengths=LENGTHS):
    """Random logits and drafts; nine of ten drafts are among the target's first three."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(lengths) + len(lengths), VOCAB, generator=generator) * 3 + 2
    metadata = metadata_of([[0] * n for n in lengths])
    best = logits[metadata.target_logits_indices].topk(3, dim=-1).indices
    rank = torch.randint(0, 3, (len(best), 1), generator=generator)
    drafts = best.gather(1, rank).squeeze(1)
    elsewhere = torch.rand(len(best), generator=generator) > 0.9
    drafts[elsewhere] = torch.randint(-1, VOCAB, (int(elsewhere.sum()),), generator=generator)
    metadata.draft_token_ids = drafts.int()
    return metadata, logits


def drafts_of(metadata):
    return [part.tolist() for part in metadata.draft_token_ids.split(metadata.num_draft_tokens)]


def emitted(output):
    """The tokens of each request."""
    return [[token for token in row if token != -1] for row in output.sampled_token_ids.tolist()]
