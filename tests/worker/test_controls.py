"""Spans, scopes, bounds, repeats and `mars_return` in real engines on a tiny model.

`mars_return` is checked against the target: the relaxed positions of a greedy answer are exactly
those whose token is not the target's argmax.
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
REQUEST_BOUNDS = [{"mars_max_loss": bound} if bound < math.inf else {} for bound in BOUNDS]
MARS = {"rejection_sample_method": "mars"}
NOTHING = {"num_relaxed_tokens": 0, "relaxed_positions": [], "loss_nats": []}


class Engine:
    def __init__(self, llm):
        self.llm = llm

    def ask(self, prompts=PROMPTS, **sampling):
        """CompletionOutput of each prompt; `extra_args` may be a list, one for each request."""
        from vllm import SamplingParams

        extra_args = sampling.pop("extra_args", {})
        if isinstance(extra_args, dict):
            extra_args = [extra_args] * len(prompts)
        params = [
            SamplingParams(
                **{"temperature": 0, "max_tokens": 48, "ignore_eos": True, **sampling},
                detokenize=False,
                extra_args={"mars_return": True, **options},
            )
            for options in extra_args
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [out.outputs[0] for out in self.llm.generate(inputs, params, use_tqdm=False)]

    def metrics(self, name):
        """Values of a metric by its labels other than the model and the engine."""
        return {
            tuple(
                value
                for label, value in metric.labels.items()
                if label not in ("model_name", "engine")
            ): metric.value
            for metric in self.llm.get_metrics()
            if metric.name == name
        }


@pytest.fixture(scope="module")
def engine(models):
    @contextmanager
    def start(engine_options=None, **options):
        fixed = {"draft_sample_method": "greedy", "mars_strict_opening": 0}
        speculation = workload.draft_model(models[1], **{**MARS, **fixed, **options})
        with engine_in_process(models[0], speculation, **(engine_options or {})) as llm:
            yield Engine(llm)

    return start


def not_argmax(target, prompt, tokens):
    """Positions of an answer whose token is not the target's argmax."""
    firsts = first_choices(target, prompt, tokens)
    pairs = zip(tokens, firsts, strict=True)
    return [position for position, (token, first) in enumerate(pairs) if token != first]


def lost_nats():
    """Loss of all answers of this process; vLLM's `get_metrics` rounds counters to integers."""
    families = {family.name: family for family in REGISTRY.collect()}
    samples = families["vllm:mars_lost_nats"].samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def returned(output):
    return output.spec_decode_metrics.mars


@pytest.mark.parametrize(
    ("metric", "loose", "strict"), [("theta", 0.01, 1.0), ("price", 1000.0, 0.0)]
)
def test_return_lists_the_tokens_that_are_not_the_targets_argmax(
    engine, models, metric, loose, strict
):
    option = f"mars_{metric}"
    with engine(**{option: loose}) as running:
        outputs = running.ask()
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            report, tokens = returned(output), list(output.token_ids)
            assert report[metric] == loose
            assert report["relaxed_positions"] == not_argmax(models[2], prompt, tokens)
            assert report["num_relaxed_tokens"] == len(report["relaxed_positions"])
        relaxed = sum(returned(output)["num_relaxed_tokens"] for output in outputs)
        assert relaxed > 0
        assert sum(running.metrics("vllm:mars_relaxed_tokens").values()) >= relaxed

        for output in running.ask(extra_args={option: strict}):
            assert returned(output) == {metric: strict, **NOTHING}
        silent = running.ask(extra_args={"mars_return": False})
        assert all(output.spec_decode_metrics is None for output in silent)

        # In a batch of lossy requests, a request with bound 0 gets the target's answer.
        one_strict = [{}, {"mars_max_loss": 0}, {}, {}]
        answers = running.ask(extra_args=one_strict)
        assert returned(answers[1]) == {metric: strict, **NOTHING}
        assert not_argmax(models[2], PROMPTS[1], list(answers[1].token_ids)) == []
        assert answers[0].token_ids == outputs[0].token_ids
        sampled = running.ask(temperature=1.0, seed=1, extra_args=one_strict)[1]
        assert returned(sampled) == {
            metric: strict,
            "draft_sample_method": "greedy",
            "log_ratios": [0.0] * len(sampled.token_ids),
            "drift_nats": 0.0,
        }

        # Requests with different bounds in a batch; the first one has none.
        refused = 0
        for temperature in (0.0, 1.0) if metric == "theta" else (0.0,):
            answers = running.ask(temperature=temperature, seed=1, extra_args=REQUEST_BOUNDS)
            if not temperature:
                assert answers[0].token_ids == outputs[0].token_ids
            lost = [
                check_promise(models[2], prompt, list(output.token_ids), returned(output), bound)
                for prompt, output, bound in zip(PROMPTS, answers, BOUNDS, strict=True)
            ]
            assert lost[1] > 0
            before, refused = refused, running.metrics("vllm:mars_refused_positions")["loss",]
            assert refused > before
        reported = sum(sum(returned(output)["loss_nats"]) for output in outputs)
        assert sum(running.metrics("vllm:mars_lost_nats").values()) > reported > 0


def test_nothing_is_lost_at_an_answers_last_token(engine, models):
    """Whether at `max_tokens` or a stop token; the counters agree with the reports."""
    with engine(mars_price=3.0, mars_max_loss=100.0) as running:
        (free,) = running.ask(PROMPTS[:1])
        relaxed = returned(free)["relaxed_positions"]
        assert relaxed
        stop = free.token_ids[relaxed[-1]]
        for output in running.ask(temperature=1.0, seed=3, max_tokens=4):
            assert returned(output)["log_ratios"][-1] == 0
        for sampling in (
            *({"max_tokens": most} for most in range(1, 6)),
            {"stop_token_ids": [stop]},
        ):
            before = lost_nats()
            outputs = running.ask(**sampling)
            reported = sum(sum(returned(output)["loss_nats"]) for output in outputs)
            assert lost_nats() - before == pytest.approx(reported, abs=1e-9)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                tokens = list(output.token_ids)
                relaxed = not_argmax(models[2], prompt, tokens)
                assert returned(output)["relaxed_positions"] == relaxed
                assert len(tokens) - 1 not in relaxed
                if "stop_token_ids" in sampling:
                    assert stop not in [tokens[position] for position in relaxed]


def test_a_bound_without_a_price_sets_the_price(engine, models):
    """A request gets the same answer in a batch as alone, and may ask for a smaller bound.

    The opening is strict; the budget it saves can be spent after it.
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
        assert all(not any(answer[:8]) and any(answer[8:]) for answer in ratios)
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
    """The first prompt's answer from a lossy engine, lossy and strict."""
    with engine(**LOOSE) as running:
        (loose,) = running.ask(PROMPTS[:1])
        (strict,) = running.ask(PROMPTS[:1], extra_args={"mars_theta": 1})
    return list(loose.token_ids), list(strict.token_ids)


def frequent_and_other(tokens):
    """The most frequent token of an answer, and another one."""
    frequent = max(set(tokens), key=tokens.count)
    return frequent, next(token for token in tokens if token != frequent)


def test_nothing_is_relaxed_inside_a_span(models, engine, loose_and_strict):
    tiny_models.tokenizer(models[0], ends="</s> ")
    start, end = frequent_and_other(loose_and_strict[0])
    spans = ((start, end), (PROMPTS[3][-1], None))
    # Spans that are open from long ago, opened before a message's end, and closed.
    continued = [
        [7, PROMPTS[3][-1], *PROMPTS[0] * 40, 1, 9],
        [7, PROMPTS[3][-1], 5, 2, *PROMPTS[0]],
        [7, start, 5, *PROMPTS[0] * 40, end],
    ]
    # Prefilled in chunks, and then from the prefix cache.
    prompts = [*PROMPTS, *continued] * 2
    long = {"max_model_len": 512, "max_num_batched_tokens": 64}
    options = {**LOOSE, "mars_strict_spans": [list(span) for span in spans]}
    with engine({"skip_tokenizer_init": False, **long}, **options) as running:
        outputs = [running.ask([prompt])[0] for prompt in prompts]
        assert running.metrics("vllm:prefix_cache_hits")[()] > 0
        assert running.metrics("vllm:mars_refused_positions")["span",] > 0
    tracker = MarkerTracker(MarsConfig(theta=0.01, strict_spans=spans, turns=(2,)))
    check_strict_positions(tracker, prompts, outputs, lambda state: tracker.reason(state) != 0)
    # Opened by the last message, and by an earlier one.
    assert [returned(out)["relaxed_positions"] != [] for out in outputs[3:6]] == [0, 0, 1]
    # Without a tokenizer the server cannot find where a message begins.
    with engine(long, **options) as running:
        unknown = running.ask(prompts[:7])
    strict = {"theta": 1, "strict": "prompt", **NOTHING}
    assert [returned(output) == strict for output in unknown] == [0, 0, 0, 1, 1, 1, 0]


def check_strict_positions(tracker, prompts, outputs, is_strict):
    """Checks that no position is relaxed whose state is strict, and that both kinds occur."""
    num_strict = num_relaxed = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        state, relaxed = tracker.initial_state(prompt), returned(output)["relaxed_positions"]
        for position, token in enumerate(output.token_ids):
            num_strict += is_strict(state)
            num_relaxed += position in relaxed
            assert not (is_strict(state) and position in relaxed)
            state = tracker.advance(state, [token])
    assert num_strict > 0 and num_relaxed > 0


def test_nothing_is_relaxed_outside_the_scope(models, engine, loose_and_strict):
    """Whether a request or the server sets the scope."""
    tiny_models.tokenizer(models[0], ends="</s> ")
    start, end = frequent_and_other(loose_and_strict[1])
    markers = {"reasoning_start_str": f"w{start}", "reasoning_end_str": f"w{end}"}
    # The last prompt begins thinking for the answer, after a message's end.
    prompts = [*PROMPTS[:3], [31, 2, start]]
    config = MarsConfig(theta=0.01, thinking_start=start, thinking_end=end, turns=(2,))

    def check(scope, outputs):
        assert {returned(output)["scope"] for output in outputs} == {scope}
        check_strict_positions(
            MarkerTracker(config),
            prompts,
            outputs,
            lambda state: bool(state & THINKING) != (scope == "thinking"),
        )
        return [list(output.token_ids) for output in outputs]

    with_tokenizer = {"skip_tokenizer_init": False, "reasoning_config": markers}
    with engine(with_tokenizer, **LOOSE) as running:
        check("thinking", running.ask(prompts, extra_args={"mars_scope": "thinking"}))
        by_request = check("answer", running.ask(prompts, extra_args={"mars_scope": "answer"}))
        assert running.metrics("vllm:mars_refused_positions")["scope",] > 0
    with engine(with_tokenizer, **LOOSE, mars_scope="answer") as running:
        assert check("answer", running.ask(prompts)) == by_request


def preferred(output):
    """Positions whose token the rule made more probable."""
    report = returned(output)
    if "log_ratios" in report:
        return [position for position, ratio in enumerate(report["log_ratios"]) if ratio > 0]
    return report["relaxed_positions"]


def test_repeated_ngrams_are_not_preferred(engine, models, tmp_path):
    """With a draft model that knows three words.

    A relaxed token of a greedy answer repeats no longer n-gram than the argmax would. In a sampled
    answer no preferred token repeats an n-gram.
    """
    draft = LlamaForCausalLM.from_pretrained(models[1])
    with torch.no_grad():
        draft.lm_head.weight[8:] = draft.lm_head.weight[:5] = 0
    draft.save_pretrained(tmp_path)
    loose = {"model": str(tmp_path), "num_speculative_tokens": 6}
    with engine(**loose, mars_price=1000.0) as running:
        for temperature in (0.0, 1.0):
            outputs, num_preferred = running.ask(temperature=temperature, seed=1, max_tokens=64), 0
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                tokens = list(output.token_ids)
                firsts = first_choices(models[2], prompt, tokens)
                for position in preferred(output):
                    before = tokens[:position]
                    most = 0 if temperature else oracle.repeats(before, firsts[position])
                    assert oracle.repeats(before, tokens[position]) <= most
                    num_preferred += 1
            assert num_preferred > 0
        assert running.metrics("vllm:mars_refused_positions")["repeat",] > 0


# Memory for a few answers; steps too short for all requests; the same with priorities.
CROWDS = {
    "memory": {"block_size": 32, "num_gpu_blocks_override": 11},
    "budget": {"max_num_batched_tokens": 16},
    "priority": {"max_num_batched_tokens": 16, "scheduling_policy": "priority"},
}


@pytest.mark.parametrize(
    "crowd", ["memory", pytest.param("budget", marks=pytest.mark.nightly), "priority"]
)
def test_requests_that_wait_for_others_may_lose_as_much(models, crowd):
    """Strict answers are the same in a batch as alone.

    Lossy answers may differ, since vLLM drops drafts of waiting requests, but keep their bound.
    """
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": workload.prompt(seed, 4 + seed)} for seed in range(8)]
    order = {"priority": [number % 3 for number in range(8)]} if crowd == "priority" else {}
    options = {"max_num_seqs": 8, "enable_prefix_caching": False, **CROWDS[crowd]}
    speculation = workload.draft_model(models[1], **MARS, mars_max_loss=0.1)
    with engine_in_process(models[0], speculation, **options) as llm:

        def both(**extra_args):
            params = SamplingParams(
                temperature=0,
                max_tokens=60,
                ignore_eos=True,
                detokenize=False,
                extra_args={"mars_return": True, **extra_args},
            )
            alone = [llm.generate([one], params, use_tqdm=False)[0] for one in inputs]
            together = llm.generate(inputs, params, use_tqdm=False, **order)
            return ([request.outputs[0] for request in answers] for answers in (alone, together))

        alone, together = both(mars_price=0)
        assert [out.token_ids for out in together] == [out.token_ids for out in alone]
        alone, together = both()
        lost = [0.0, 0.0]
        for which, answers in enumerate((alone, together)):
            for request, out in zip(inputs, answers, strict=True):
                tokens, prompt = list(out.token_ids), request["prompt_token_ids"]
                lost[which] += check_promise(models[2], prompt, tokens, returned(out), 0.1)
        assert lost[1] > 0.9 * lost[0] > 1
        preemptions = counters(llm)["vllm:num_preemptions"]
        assert (preemptions > 0) == (crowd == "memory")
