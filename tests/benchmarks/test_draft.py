"""The making of an EAGLE-3 head, on a tiny target: prompts, data, training, export, acceptance."""

import hashlib
import json
import multiprocessing
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

import tiny_models
from benchmarks.draft import __main__ as command
from benchmarks.draft import prompts, start
from benchmarks.draft.data import Shard, make_data, read_states, save_shard
from benchmarks.draft.export import export
from benchmarks.draft.head import new_head
from benchmarks.draft.recipe import Recipe
from benchmarks.draft.target import Target, vllm_answers
from benchmarks.draft.train import choose_draft_tokens, make_batch, num_steps, train
from engines import engine_in_process, greedy_tokens
from vllm_mars.local.draft_head import PACKAGED_HEAD, check_head
from vllm_mars.local.drafts import CHOSEN_BY_REQUESTS
from vllm_mars.local.prompts import load_prompts

TINY = Recipe(
    shards=3, shard_prompts=12, max_tokens=12, draft_vocab_size=256, epochs=1.0, batch=4, warm_up=2
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    made = tiny_models.llama(directory)
    with torch.no_grad():
        # So near a function of the last token that least squares guess it.
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    made.save_pretrained(directory)
    tiny_models.tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def target(model):
    return Target(model, torch.float32)


@pytest.fixture(scope="module")
def answer(model):
    """Greedy answers of transformers, at any temperature."""
    whole = LlamaForCausalLM.from_pretrained(model)

    def answer(asked, heat, max_tokens, seed):
        rows = (
            whole.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=max_tokens)
            for ids in asked
        )
        return [row[0, len(ids) :].tolist() for ids, row in zip(asked, rows, strict=True)]

    return answer


@pytest.fixture(scope="module")
def shards(model, target, answer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    return make_data(directory, TINY, target, AutoTokenizer.from_pretrained(model), answer)


def trained(target, shards, recipe):
    head = new_head(target, choose_draft_tokens(shards, 256, tiny_models.VOCAB))
    start.start_linear(head, target, Shard(shards[0]))
    return head, list(train(head, target, shards, recipe))


def drafted(config):
    """How many tokens vLLM drafts where nothing else is said."""
    return config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]


def test_the_prompts_are_those_of_the_packaged_head():
    earlier = [([{"role": "user", "content": "Q"}], "One red fox. Two red foxes. Three. Cut")]
    rng = random.Random(0)
    drawn = [prompts.draw(rng, found) for found in ([], earlier) for _ in range(500)]
    checksum = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()
    assert checksum.startswith("e4862e6ca8b8f406"), (
        "prompts.json or the order of the draws has changed"
    )
    follow_ups = [messages for messages in drawn[500:] if len(messages) == 3]
    assert follow_ups[0][1] == {"role": "assistant", "content": earlier[0][1]}
    assert sum("Two red foxes." in messages[-1]["content"] for messages in drawn) > 10
    assert not any("Cut" in messages[-1]["content"] for messages in drawn)


def test_the_demos_prompts_are_no_training_prompts(model, target, answer, tmp_path, monkeypatch):
    measured = load_prompts()[0].turns[0]
    drawn = [[{"role": "user", "content": text}] for text in ("w9 w8", measured)] * 20
    monkeypatch.setattr(prompts, "draw", lambda rng, earlier: drawn.pop())
    tokenizer = AutoTokenizer.from_pretrained(model)
    make_data(tmp_path, replace(TINY, shards=1), target, tokenizer, answer)
    lines = (tmp_path / "00000.jsonl").read_text().splitlines()
    assert {json.loads(line)[0][0]["content"] for line in lines} == {"w9 w8"}


def test_training_lowers_the_loss_of_each_step(target, shards):
    recipe = replace(TINY, epochs=6.0, ramp=0.0)
    _, log = trained(target, shards, recipe)
    assert len(log) == num_steps(recipe) == 54
    for step in range(3):
        first, last = (sum(line["loss"][step] for line in part) for part in (log[:9], log[-9:]))
        assert last < first


def test_the_command_writes_a_head_that_fits(model, answer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "vllm_answers", lambda model: (answer, lambda: None))
    line = f"--model {model} --work {tmp_path} --shards 2 --shard-prompts 12 --max-tokens 12"
    line += " --draft-vocab-size 256 --epochs 1 --batch 4 --warm-up 2"
    assert command.main(line.split()) == 0
    head = tmp_path / "head"
    check_head(head, model)
    assert drafted(json.loads((head / "config.json").read_text())) == 4
    assert capsys.readouterr().out == f"wrote {head}\n"
    record = json.loads((head / "training.json").read_text())
    assert record["steps"] == 6 and record["recipe"]["max_tokens"] == 12
    packaged, made = (
        json.loads((directory / "config.json").read_text()) for directory in (PACKAGED_HEAD, head)
    )
    assert made.keys() == packaged.keys()
    assert made["transformer_layer_config"]["hidden_size"] == tiny_models.HIDDEN
    names = load_file(PACKAGED_HEAD / "model.safetensors").keys()
    tensors = load_file(head / "model.safetensors")
    assert tensors.keys() == names - {"fc_norm.3.weight"}, "the tiny target has three states"
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert command.main([*line.split(), "--max-tokens", "13"]) == 1
    assert "name another --work" in capsys.readouterr().err


def test_answers_shorter_than_what_is_drafted(target, tmp_path):
    for tokens in (1, 3):
        answers = [read_states(target, [5, 6], [7, 8, 9][:tokens])] * 2
        save_shard(tmp_path / f"{tokens}", answers)
    recipe = replace(TINY, shards=2, shard_prompts=2, steps_ahead=7, ramp=0.0)
    head = new_head(target, torch.arange(512))
    log = list(train(head, target, [tmp_path / "1", tmp_path / "3"], recipe))
    assert [line["tokens"] for line in log] == [0, 4]
    assert all(parameter.isfinite().all() for parameter in head.parameters())


@torch.inference_mode()
def accepted_drafts(target, head, answer, count):
    """How many of `count` drafts each step of a greedy answer accepts, strictly, without vLLM.

    A draft counts only where all before it in its step are the target's own tokens, so one pass of
    the head over the target's tokens gives all guesses that matter.
    """
    batch = make_batch([answer.tokens], [answer.states], [answer.prompt_tokens], count)
    embeddings = target.embedding[batch.tokens[:, 1:]]
    right = []
    for step, hidden in enumerate(head.steps(batch.states, embeddings, batch.anchors, count)):
        guesses = head.draft_tokens[head.lm_head(hidden[0]).argmax(-1)]
        true = batch.tokens[0, batch.anchors[0] + 2 + step]
        right.append((guesses == true) & (batch.valid[0] > step))
    accepted = torch.stack(right).int().cumprod(0).sum(0).tolist()
    found, place = [], 0
    # The prefill gives the first token; a step emits its accepted drafts and one token more.
    while place < len(answer.tokens) - 1 - answer.prompt_tokens:
        found.append(accepted[place])
        place += accepted[place] + 1
    return found


def verified(model, head, asked, max_tokens, thetas):
    """The answers of vLLM to each prompt by itself, and its counters, at each theta."""
    given = {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": drafted(json.loads((head / "config.json").read_text())),
        **CHOSEN_BY_REQUESTS["theta"],
    }
    options = {"max_num_seqs": 1, "enable_prefix_caching": False}
    with engine_in_process(model, given, **options) as llm:

        def counts():
            metrics = {metric.name: metric for metric in llm.get_metrics()}
            drafts = metrics["vllm:spec_decode_num_drafts"].value
            return [drafts, *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values]

        for theta in thetas:
            before = counts()
            tokens = greedy_tokens(
                *(llm, asked),
                **{"max_tokens": max_tokens, "ignore_eos": False, "stop_token_ids": [2]},
                extra_args={"mars_theta": theta},
            )
            drafts, *accepted = (now - then for now, then in zip(counts(), before, strict=True))
            yield {"tokens": tokens, "drafts": drafts, "accepted": accepted}


@pytest.mark.engine
@pytest.mark.nightly
def test_vllm_drafts_what_we_expect_of_the_head(model, target, answer, tmp_path, monkeypatch):
    """Positions, inputs and hidden states agree if the counts of acceptance do."""
    asked = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]
    rng = random.Random(0)
    drawn = [[rng.randrange(3, 512) for _ in range(6)] for _ in range(40)]
    # All heads shall look at their own token.
    monkeypatch.setattr(start, "FREE_HEADS", 0)
    head = new_head(target, torch.arange(500))
    found = answer(asked + drawn, [0.0] * 43, 60, 0)
    save_shard(tmp_path / "shard", [*map(read_states, [target] * 43, asked + drawn, found)])
    start.start_linear(head, target, Shard(tmp_path / "shard"))
    export(head, tmp_path / "head", model, num_speculative_tokens=3, dtype=torch.float32)
    answers = answer(asked, [0.0] * 3, 100, 0)
    taken = []
    for prompt, tokens in zip(asked, answers, strict=True):
        taken += accepted_drafts(target, head, read_states(target, prompt, tokens), 3)
    strict, relaxed = verified(model, tmp_path / "head", asked, 100, (1.0, 0.5))
    assert strict["tokens"] == answers
    assert 1 + sum(taken) / len(taken) > 1.2
    # The engine also drafts past the end of an answer, once at most.
    assert abs(strict["drafts"] - len(taken)) <= len(asked)
    for place, seen in enumerate(strict["accepted"]):
        assert abs(seen - sum(count > place for count in taken)) <= len(asked)
    strict_length, relaxed_length = (
        sum(counts["accepted"]) / counts["drafts"] for counts in (strict, relaxed)
    )
    assert relaxed_length > strict_length


@pytest.mark.engine
@pytest.mark.nightly
def test_the_engine_answers_as_transformers_does(model, answer):
    asked = [[5, 6, 7, 8], [100, 3, 200, 9]]
    ask, end = vllm_answers(model)
    try:
        greedy, sampled = (ask(asked, [heat] * 2, 20, 0) for heat in (0.0, 1.0))
    finally:
        end()
        multiprocessing.active_children()
    assert greedy == answer(asked, [0.0] * 2, 20, 0)
    assert sampled != greedy
