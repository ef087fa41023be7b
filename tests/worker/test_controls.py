"""Spans, bounds, the guard and `mars_return` in real engines on a tiny model.

What `mars_return` says is held against the target itself: of greedy answers its positions are
exactly those whose token is not the target's first choice.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from prometheus_client import REGISTRY
from transformers import LlamaForCausalLM

import oracle
import tiny_models
import workload
from engines import counters, engine_in_process
from promise import check_promise, first_choices
from vllm_mars import MarsConfig
from vllm_mars.kernels.constraints.markers import THINKING, MarkerTracker

pytestmark = pytest.mark.engine

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7], [31, 32, 33]]
BOUNDS = (math.inf, 0.5, 0.001, 0.0)
OWN_BOUNDS = [{"mars_max_loss": bound} if bound < math.inf else {} for bound in BOUNDS]
NOTHING = {"num_relaxed_tokens": 0, "relaxed_positions": [], "loss_nats": []}


class Engine:
    """A running engine."""

    def __init__(self, llm):
        self.llm = llm

    def ask(self, prompts=PROMPTS, **sampling):
        """CompletionOutput of each prompt; `extra_args` of all, or of each in a list."""
        from vllm import SamplingParams

        extra_args = sampling.pop("extra_args", {})
        if isinstance(extra_args, dict):
            extra_args = [extra_args] * len(prompts)
        params = [
            SamplingParams(
                **{"temperature": 0, "max_tokens": 48, "ignore_eos": True, **sampling},
                detokenize=False,
                extra_args={"mars_return": True, **own},
            )
            for own in extra_args
        ]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [out.outputs[0] for out in self.llm.generate(given, params, use_tqdm=False)]

    def metrics(self, name):
        """Values of a metric by its labels, but for those of vLLM's engines."""
        own = ("model_name", "engine")
        return {
            tuple(value for label, value in metric.labels.items() if label not in own): metric.value
            for metric in self.llm.get_metrics()
            if metric.name == name
        }


@pytest.fixture(scope="module")
def engine(models):
    @contextmanager
    def start(of_engine=None, **options):
        given = {
            "method": "draft_model",
            "model": str(models[1]),
            "num_speculative_tokens": 3,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "mars",
            "mars_strict_opening": 0,
            **options,
        }
        with engine_in_process(models[0], given, **(of_engine or {})) as llm:
            yield Engine(llm)

    return start


def not_first_choices(target, prompt, tokens):
    """Positions of an answer whose token is not the target's first choice."""
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits.argmax(-1) != torch.tensor(tokens)).nonzero().flatten().tolist()


def lost_nats():
    """What all answers of this process have lost; vLLM's own view of a counter is an integer."""
    families = {family.name: family for family in REGISTRY.collect()}
    samples = families["vllm:mars_lost_nats"].samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def returned(output):
    return output.spec_decode_metrics.mars


@pytest.mark.parametrize(
    ("metric", "loose", "strict"), [("theta", 0.01, 1.0), ("price", 1000.0, 0.0)]
)
def test_return_names_what_is_not_the_targets_first_choice(engine, models, metric, loose, strict):
    """Each by its own theta or price; beside requests that do not ask, and those cut short."""
    option = f"mars_{metric}"
    with engine(**{option: loose}) as running:
        outputs = running.ask()
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            found = returned(output)
            assert found[metric] == loose
            tokens = list(output.token_ids)
            assert found["relaxed_positions"] == not_first_choices(models[2], prompt, tokens)
            assert found["num_relaxed_tokens"] == len(found["relaxed_positions"])
        relaxed = sum(returned(output)["num_relaxed_tokens"] for output in outputs)
        assert relaxed > 0
        assert sum(running.metrics("vllm:mars_relaxed_tokens").values()) >= relaxed

        for output in running.ask(extra_args={option: strict}):
            assert returned(output) == {metric: strict, **NOTHING}
        silent = running.ask(extra_args={"mars_return": False})
        assert all(output.spec_decode_metrics is None for output in silent)

        # Beside relaxed ones, a request that may lose nothing gets the target's own answer.
        own = [{"mars_max_loss": 0} if place == 1 else {} for place in range(len(PROMPTS))]
        answers = running.ask(extra_args=own)
        assert returned(answers[1]) == {metric: strict, **NOTHING}
        assert not_first_choices(models[2], PROMPTS[1], list(answers[1].token_ids)) == []
        assert answers[0].token_ids == outputs[0].token_ids
        sampled = running.ask(temperature=1.0, seed=1, extra_args=own)[1]
        ratios = [0.0] * len(sampled.token_ids)
        drafts = {"draft_sample_method": "greedy", "log_ratios": ratios, "drift_nats": 0.0}
        assert returned(sampled) == {metric: strict, **drafts}

        # Bounds of their own in one batch; the first request has none.
        refused = 0
        for temperature in (0.0, 1.0) if metric == "theta" else (0.0,):
            answers = running.ask(temperature=temperature, seed=1, extra_args=OWN_BOUNDS)
            if not temperature:
                assert answers[0].token_ids == outputs[0].token_ids
            lost = [
                check_promise(models[2], prompt, list(output.token_ids), returned(output), bound)
                for prompt, output, bound in zip(PROMPTS, answers, BOUNDS, strict=True)
            ]
            assert lost[1] > 0
            now = running.metrics("vllm:mars_refused_positions")["loss",]
            assert now > refused
            refused = now
        told = sum(sum(returned(output)["loss_nats"]) for output in outputs)
        assert sum(running.metrics("vllm:mars_lost_nats").values()) > told > 0


def test_nothing_is_paid_for_what_cannot_come(engine, models):
    """At the cap and at a stop token; the counters tell what the answers do."""
    with engine(mars_price=3.0, mars_max_loss=100.0) as running:
        (free,) = running.ask(PROMPTS[:1])
        relaxed = returned(free)["relaxed_positions"]
        assert relaxed
        stop = free.token_ids[relaxed[-1]]
        for sampling in (
            *({"max_tokens": most} for most in range(1, 6)),
            {"stop_token_ids": [stop]},
            {"temperature": 1.0, "seed": 3, "max_tokens": 4},
        ):
            before = lost_nats()
            outputs = running.ask(**sampling)
            lost = lost_nats() - before
            told = [returned(output) for output in outputs]
            if "temperature" in sampling:
                assert all(answer["log_ratios"][-1] == 0 for answer in told)
                continue
            assert lost == pytest.approx(sum(sum(answer["loss_nats"]) for answer in told), abs=1e-9)
            for prompt, output, answer in zip(PROMPTS, outputs, told, strict=True):
                tokens = list(output.token_ids)
                found = not_first_choices(models[2], prompt, tokens)
                assert answer["relaxed_positions"] == found
                assert len(tokens) - 1 not in found
                if "stop_token_ids" in sampling:
                    assert stop not in [tokens[position] for position in found]


def test_a_bound_alone_sets_the_price(engine, models):
    """The same in a batch as alone, greedy and sampled, and a request may ask for less.

    An opening is strict, and what it saves is there to be spent behind it.
    """
    bound, smaller = 0.5, {"mars_max_loss": 0.1}
    with engine(mars_max_loss=bound, mars_strict_opening=8) as running:
        outputs = running.ask()
        assert min(min(returned(output)["relaxed_positions"]) for output in outputs) == 8
        lost = [
            check_promise(models[2], prompt, list(out.token_ids), returned(out), bound)
            for prompt, out in zip(PROMPTS, outputs, strict=True)
        ]
        assert sum(lost) > 0 and returned(outputs[0])["max_loss"] == bound
        (alone,) = running.ask(PROMPTS[1:2])
        assert alone.token_ids == outputs[1].token_ids
        spared = running.ask(extra_args=smaller)
        for prompt, out in zip(PROMPTS, spared, strict=True):
            check_promise(models[2], prompt, list(out.token_ids), returned(out), 0.1)
        # Bound to nothing, and by a price of its own.
        nothing, priced = running.ask(
            PROMPTS[:2], extra_args=[{"mars_max_loss": 0}, {"mars_price": 0}]
        )
        assert returned(nothing) == {"price": 0.0, **NOTHING}
        assert returned(priced) == {"price": 0.0, **NOTHING}

        hot = running.ask(temperature=1.0, seed=7)
        (alone,) = running.ask(PROMPTS[1:2], temperature=1.0, seed=7)
        assert alone.token_ids == hot[1].token_ids
        assert returned(alone) == pytest.approx(returned(hot[1]), abs=1e-4)
        ratios = [returned(out)["log_ratios"] for out in hot]
        assert all(not any(own[:8]) and any(own[8:]) for own in ratios)
        assert running.metrics("vllm:mars_refused_positions")["opening",] > 0
        assert running.metrics("vllm:mars_max_loss_nats_per_token") == {(): bound}
        generated = running.metrics("vllm:generation_tokens")[()]
        lost = sum(running.metrics("vllm:mars_lost_nats").values())
        assert (
            0 < lost <= bound * generated + 2.0 * running.metrics("vllm:request_success")["length",]
        )


LOOSE = {"mars_theta": 0.01}


@pytest.fixture(scope="module")
def loose_and_strict(engine):
    """The tokens of the first prompt's answer by a lossy engine, and those that it asks for."""
    with engine(**LOOSE) as running:
        answers = [running.ask(PROMPTS[:1], extra_args=own) for own in ({}, {"mars_theta": 1})]
    return [list(answer.token_ids) for (answer,) in answers]


def test_nothing_is_relaxed_inside_a_span(models, engine, loose_and_strict):
    tiny_models.tokenizer(models[0], ends="</s> ")
    # A token that occurs opens the span, the next one of that answer closes it.
    tokens, _ = loose_and_strict
    start = max(set(tokens), key=tokens.count)
    end = next(token for token in tokens if token != start)
    spans = ((start, end), (PROMPTS[3][-1], None))
    # An answer goes on: inside of what was opened long ago, with a special token since, and behind.
    gone_on = [
        [7, PROMPTS[3][-1], *PROMPTS[0] * 40, 1, 9],
        [7, PROMPTS[3][-1], 5, 2, *PROMPTS[0]],
        [7, start, 5, *PROMPTS[0] * 40, end],
    ]
    # In chunks, and then from the prefix cache.
    prompts = [*PROMPTS, *gone_on] * 2
    long = {"max_model_len": 512, "max_num_batched_tokens": 64}
    own = {"mars_strict_spans": [list(span) for span in spans]}
    with engine({"skip_tokenizer_init": False, **long}, **LOOSE, **own) as running:
        outputs = [running.ask([prompt])[0] for prompt in prompts]
        assert running.metrics("vllm:prefix_cache_hits")[()] > 0
        refused = running.metrics("vllm:mars_refused_positions")["span",]
    assert refused > 0
    walk = MarkerTracker(MarsConfig(theta=0.01, strict_spans=spans, turns=(2,)))
    inside = relaxed = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        state = walk.initial_state(prompt)
        for position, token in enumerate(output.token_ids):
            is_relaxed = position in returned(output)["relaxed_positions"]
            inside += walk.is_strict(state)
            relaxed += is_relaxed
            assert not (is_relaxed and walk.is_strict(state))
            state = walk.advance(state, [token])
    assert inside > 0
    assert relaxed > 0
    # Opened by the last message, and by one before it.
    assert [returned(out)["relaxed_positions"] != [] for out in outputs[3:6]] == [0, 0, 1]
    # Without a tokenizer it is not known where a message begins.
    with engine(long, **LOOSE, **own) as running:
        unknown = running.ask(prompts[:7])
    strict = {"theta": 1, "strict": "prompt", **NOTHING}
    assert [returned(output) == strict for output in unknown] == [0, 0, 0, 1, 1, 1, 0]


def test_nothing_is_relaxed_outside_the_scope(models, engine, loose_and_strict):
    """Neither by a request's own scope nor by the server's."""
    tiny_models.tokenizer(models[0], ends="</s> ")
    # A token that occurs begins the thinking, another one of that answer ends it.
    _, tokens = loose_and_strict
    start = max(set(tokens), key=tokens.count)
    end = next(token for token in tokens if token != start)
    markers = {"reasoning_start_str": f"w{start}", "reasoning_end_str": f"w{end}"}
    # Behind what stands between turns the last prompt begins the thinking for the answer.
    prompts = [*PROMPTS[:3], [31, 2, start]]
    walk = MarkerTracker(MarsConfig(theta=0.01, thinking_start=start, thinking_end=end, turns=(2,)))

    def check(scope, outputs):
        outside = relaxed = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            assert returned(output)["scope"] == scope
            state, where = walk.initial_state(prompt), returned(output)["relaxed_positions"]
            for position, token in enumerate(output.token_ids):
                is_outside = bool(state & THINKING) != (scope == "thinking")
                outside += is_outside
                relaxed += position in where
                assert not (is_outside and position in where)
                state = walk.advance(state, [token])
        assert outside > 0 and relaxed > 0
        return [list(output.token_ids) for output in outputs]

    reads = {"skip_tokenizer_init": False, "reasoning_config": markers}
    with engine(reads, **LOOSE) as running:
        own = {
            scope: check(scope, running.ask(prompts, extra_args={"mars_scope": scope}))
            for scope in ("thinking", "answer")
        }
        assert running.metrics("vllm:mars_refused_positions")["scope",] > 0
    with engine(reads, **LOOSE, mars_scope="answer") as running:
        assert check("answer", running.ask(prompts)) == own["answer"]


def preferred(output):
    """Positions of the draft tokens that the rule gave preference, and the target did not."""
    told = returned(output)
    if "log_ratios" in told:
        return [position for position, ratio in enumerate(told["log_ratios"]) if ratio > 0]
    return told["relaxed_positions"]


def test_what_repeats_is_not_preferred(engine, models, tmp_path):
    """With a draft that knows three words; the guard is on by default with a price.

    Greedily a relaxed token repeats no longer n-gram than the first choice in its place would;
    while sampling none at all is preferred that repeats.
    """
    draft = LlamaForCausalLM.from_pretrained(models[1])
    with torch.no_grad():
        draft.lm_head.weight[8:] = draft.lm_head.weight[:5] = 0
    draft.save_pretrained(tmp_path)
    loose = {"model": str(tmp_path), "num_speculative_tokens": 6}
    with engine(**loose, mars_price=1000.0) as running:
        for temperature in (0.0, 1.0):
            outputs, found = running.ask(temperature=temperature, seed=1, max_tokens=64), 0
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                tokens = list(output.token_ids)
                firsts = first_choices(models[2], prompt, tokens)
                for position in preferred(output):
                    before = tokens[:position]
                    most = 0 if temperature else oracle.repeats(before, firsts[position])
                    assert oracle.repeats(before, tokens[position]) <= most
                    found += 1
            assert found > 0
        assert running.metrics("vllm:mars_refused_positions")["repeat",] > 0


# Memory for a few answers only; steps too short for all; and of these, some before others.
CROWDS = {
    "memory": {"block_size": 32, "num_gpu_blocks_override": 11},
    "budget": {"max_num_batched_tokens": 16},
    "priority": {"max_num_batched_tokens": 16, "scheduling_policy": "priority"},
}


@pytest.mark.parametrize(
    "crowd", ["memory", pytest.param("budget", marks=pytest.mark.nightly), "priority"]
)
def test_who_waits_for_others_may_lose_as_much(models, crowd):
    """Strict answers are those of each request alone.

    Lossy ones need not be, as vLLM drops drafts of who waits, and steps begin elsewhere; each keeps
    its bound.
    """
    from vllm import SamplingParams

    given = [{"prompt_token_ids": workload.prompt(seed, 4 + seed)} for seed in range(8)]
    order = {"priority": [number % 3 for number in range(8)]} if crowd == "priority" else {}
    options = {"max_num_seqs": 8, "enable_prefix_caching": False, **CROWDS[crowd]}
    drafts = {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": 3}
    speculation = {**drafts, "rejection_sample_method": "mars", "mars_max_loss": 0.1}
    with engine_in_process(models[0], speculation, **options) as llm:

        def both(**own):
            params = SamplingParams(
                temperature=0,
                max_tokens=60,
                ignore_eos=True,
                detokenize=False,
                extra_args={"mars_return": True, **own},
            )
            alone = [llm.generate([one], params, use_tqdm=False)[0] for one in given]
            together = llm.generate(given, params, use_tqdm=False, **order)
            return ([request.outputs[0] for request in answers] for answers in (alone, together))

        alone, together = both(mars_price=0)
        assert [out.token_ids for out in together] == [out.token_ids for out in alone]
        alone, together = both()
        lost = [0.0, 0.0]
        for which, answers in enumerate((alone, together)):
            for asked, out in zip(given, answers, strict=True):
                tokens, prompt = list(out.token_ids), asked["prompt_token_ids"]
                lost[which] += check_promise(models[2], prompt, tokens, returned(out), 0.1)
        assert lost[1] > 0.9 * lost[0] > 1
        preemptions = counters(llm)["vllm:num_preemptions"]
        assert (preemptions > 0) == (crowd == "memory")
