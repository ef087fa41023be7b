"""A verification step of the V1 model runner without an engine: vLLM's metadata and samplers."""

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_mars import MarsRejectionSampler
from vllm_mars.kernels.accept import naive as accept
from vllm_mars.report.counters import Counters
from vllm_mars.report.worker import StepReports
from vllm_mars.worker import sampler_v1
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
    # No request enters the batch here, so each row has the server's options.
    requests = RequestsV1(config, 20_000, 20_000, is_probabilistic=is_probabilistic)
    return MarsRejectionSampler(Sampler(logprobs_mode), None, CPU, engine_params, reports, requests)


def sampling(temperatures, *, seeds=None, output=None, drafts=None, **changes):
    """SamplingMetadata with one request for each temperature; 0 is greedy."""
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
    defaults = {
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
    return SamplingMetadata(**{**defaults, **penalties, **changes})


def metadata_of(drafts):
    """Metadata of a step in which each request's draft rows precede its bonus row."""
    metadata = SpecDecodeMetadata.make_dummy(drafts, CPU)
    is_bonus = torch.cat([torch.arange(len(d) + 1) == len(d) for d in drafts])
    metadata.logits_indices = torch.arange(len(is_bonus), dtype=torch.int32)
    metadata.bonus_logits_indices = is_bonus.nonzero().squeeze(1).int()
    metadata.target_logits_indices = (~is_bonus).nonzero().squeeze(1).int()
    return metadata


def step(seed, lengths=LENGTHS):
    """Random logits and drafts; nine of ten drafts are among the target's top three."""
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
    return [[token for token in row if token != -1] for row in output.sampled_token_ids.tolist()]


def check_probes(monkeypatch, batch, drafts, logits):
    """Verifies all probes of an `enumerated.Batch`, whose drafts a scheduler may have cut."""
    case = batch.case
    lengths = torch.tensor([len(draft) for draft in drafts])
    is_draft = torch.arange(case.steps) < lengths[:, None]
    uniform = batch.uniform[is_draft]
    for module in (rejection_sampler, sampler_v1):
        monkeypatch.setattr(module, "generate_uniform_probs", lambda *_: uniform, raising=False)

    def sample_token(_, req_idx, weights):
        return int((weights / batch.noise[req_idx]).argmax())

    def sample_bonus(logits, _):
        return (logits.softmax(-1) / batch.noise).argmax(-1)

    # Noise of strict requests with fixed drafts, of other requests, and of bonus tokens.
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, **_: self.copy_(batch.noise))
    monkeypatch.setattr(accept.CpuSamplingInputs, "sample_token", sample_token)
    monkeypatch.setattr(torch.ops._C, "fused_gumbel_argmax", sample_bonus)
    sampler = mars_sampler(
        case.config,
        case.protected,
        longest=case.steps,
        is_probabilistic=case.is_probabilistic,
    )
    requests = sampler.requests
    # Requests start without output, since all of a resumed request's budget would count as lost.
    answers = [[] for _ in drafts]
    added = [(row, case.params(), [3, 1], answer) for row, answer in enumerate(answers)]
    requests.update_state(BatchUpdate(len(answers), removed=[], added=added, moved=[]))
    for answer in answers:
        answer.extend(case.answer)
    slots, lost = requests._slots[: len(answers)], requests._records.lost
    lost[slots] = case.lost
    monkeypatch.setattr(requests, "returns", lambda _: {0: "a request"})
    output = sampler(
        metadata_of(drafts),
        batch.q[is_draft] if case.is_probabilistic else None,
        logits,
        sampling([1.0] * len(answers), output=answers, drafts=drafts),
    )
    batch.check(sampler.reports, emitted(output), lost[slots] - case.lost)
