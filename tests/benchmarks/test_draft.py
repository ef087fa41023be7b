"""The making of an EAGLE-3 head, on a tiny target: data, training, export, acceptance."""

import json
import multiprocessing
import random
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM

import tiny_models
from benchmarks.draft import __main__ as command
from benchmarks.draft import data, prompts, start
from benchmarks.draft.export import export
from benchmarks.draft.head import attend, new_head
from benchmarks.draft.recipe import Recipe
from benchmarks.draft.target import Target, vllm_answers
from benchmarks.draft.train import batch_losses, choose_draft_tokens, make_batches, train
from engines import engine_in_process, greedy_tokens
from vllm_mars.lab.prompts import Prompt
from vllm_mars.models.draft_head import PACKAGED_HEAD, check_head

TINY = Recipe(parts=2, part_size=6, max_answer_tokens=12, draft_vocab_size=256, batch_tokens=60)
END = 2


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


@pytest.fixture
def engine(answer):
    """Draws questions, and answers as transformers; `calls` are prompts and temperatures."""

    def ask(asked, heat, max_tokens, seed):
        engine.calls.append((asked, heat))
        if len(engine.calls) % 2:
            return [[300 + (seed + row) % 200, 8, END] for row in range(len(asked))]
        return answer(asked, heat, max_tokens, seed)

    engine = Mock(side_effect=lambda model=None: nullcontext(ask), calls=[])
    return engine


def test_templates_leave_no_field_open():
    rng = random.Random(0)
    drawn = [prompts.draw(rng) for _ in range(3000)]
    assert not any(f"{{{name}}}" in text for name in prompts.WORDS for text in drawn)
    assert len(set(drawn)) > 2000
    first, same, _ = prompts.fill("{Character}/{character}/{name2}", rng).split("/")
    assert first != same and first.lower() == same.lower()


def test_data_resume_and_keep_to_their_recipe(model, engine, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = data.make_data(tmp_path, TINY, tokenizer, engine())
    (begin, *_), heat = engine.calls[0]
    assert tokenizer.decode(begin) == "user" and heat == [1.0] * 4
    # Of 4 questions and 2 templates in each part.
    assert len(found) == 12 and all(len(tokens) <= 12 for _, tokens in found)
    assert {one for call in engine.calls[1::2] for one in call[1]} <= data.TEMPERATURES.keys()
    calls = len(engine.calls)
    (tmp_path / "00001.json").unlink()
    again = data.make_data(tmp_path, TINY, tokenizer, engine())
    assert again == [list(pair) for pair in found] and len(engine.calls) == calls + 2
    data.make_data(tmp_path, TINY, tokenizer, None)  # Nothing is missing.
    with pytest.raises(ValueError, match="name another --work"):
        data.make_data(tmp_path, replace(TINY, max_answer_tokens=13), tokenizer, engine())


def test_questions_that_are_left_out(model, monkeypatch):
    """Cut ones, the demo's, repeated ones, long ones, and those of earlier parts."""
    monkeypatch.setattr(data, "load_prompts", lambda: [Prompt("", "", ("w9", "w10 w11"))])
    monkeypatch.setattr(prompts, "draw", lambda rng: "w10 w11")
    questions = [[20], [9, END], [20, END], [20, END], [21] * 50 + [END], [22, END], [END]]
    recipe = replace(TINY, part_size=10, max_question_tokens=40)
    tokenizer = AutoTokenizer.from_pretrained(model)
    earlier = [tokenizer("user w22 assistant")["input_ids"]]
    rng = random.Random(0)
    asked = data.ask(rng, recipe, tokenizer, lambda *given: questions, earlier)
    assert [tokenizer.decode(ids) for ids in asked] == ["user w20 assistant"]


def test_attention_is_that_of_a_dense_mask():
    torch.manual_seed(0)
    query, *rest = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(7))
    keys, values = rest[:3], rest[3:]
    itself = torch.eye(7, dtype=torch.bool)
    mask = torch.cat([torch.ones(7, 7, dtype=torch.bool).tril(), itself, itself], 1)
    joint = (torch.cat(part, 2) for part in (keys, values))
    wanted = functional.scaled_dot_product_attention(query, *joint, mask)
    found = attend(query, keys, values)
    assert torch.allclose(found, wanted, atol=1e-6)
    weights = torch.randn_like(found)
    pairs = (torch.autograd.grad((one * weights).sum(), [query, *rest]) for one in (found, wanted))
    for one, other in zip(*pairs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("by_acceptance", [False, True])
@torch.no_grad()
def test_losses_are_those_of_one_guess_after_the_other(model, target, by_acceptance):
    ahead, rng = 3, random.Random(0)
    draft_tokens = torch.arange(0, 512, 2)
    head = new_head(target, draft_tokens)
    # Also answers that are shorter than what is drafted.
    lengths = [(3, 9), (5, 1), (2, 3), (4, 2)]
    draw = [[[rng.randrange(3, 512) for _ in range(n)] for n in pair] for pair in lengths]
    (batch,) = make_batches(draw, TINY)
    whole = LlamaForCausalLM.from_pretrained(model)
    guesses = [[] for _ in range(ahead)]
    for prompt, tokens in draw:
        ids = torch.tensor(prompt + tokens)
        p = whole(ids[None]).logits[0, :, draft_tokens].softmax(-1)
        embeddings = target.embedding[functional.pad(ids[None, 1:], (0, ahead + 1))]
        for step, hidden in enumerate(head.steps(target.states(ids[None]), embeddings, ahead)):
            for anchor in range(len(prompt) - 1, len(ids) - 2 - step):
                if ids[anchor + 2 + step] in draft_tokens:
                    q = head.lm_head(hidden[0, anchor]).softmax(-1)
                    guesses[step].append((p[anchor + 1 + step], q))
    (empty,) = make_batches([([5], [6])], TINY)
    assert not torch.cat(batch_losses(head, target, empty, ahead, by_acceptance)[:2]).any()
    losses, accepted, count = batch_losses(head, target, batch, ahead, by_acceptance)
    assert count == len(guesses[0])
    for step, pairs in enumerate(guesses):
        cross = torch.stack([-(p * q.log()).sum() for p, q in pairs])
        shares = torch.stack([torch.minimum(p, q).sum() for p, q in pairs])
        lam = torch.exp(-3 * shares.mean()) if by_acceptance else 1
        loss = (lam * cross - (1 - lam) * shares.log()).sum() / count
        assert losses[step].item() == pytest.approx(loss.item(), rel=1e-4)
        assert accepted[step].item() == pytest.approx(shares.mean().item(), rel=1e-4)


def test_training_raises_acceptance(target, answer):
    asked = [[token, token + 1] for token in range(20, 60)]
    recipe = replace(TINY, epochs=8)
    batches = make_batches(list(zip(asked, answer(asked, [], 12, 0), strict=True)), recipe)
    assert all(batch.tokens.numel() <= recipe.batch_tokens for batch in batches)
    head = new_head(target, choose_draft_tokens(batches, 256, tiny_models.VOCAB))
    log = list(train(head, target, batches, recipe))
    assert [len(line["loss"]) for line in (log[0], log[-1])] == [2, 4]
    for step in range(2):
        first, last = (sum(one["accepted"][step] for one in part) for part in (log[:9], log[-9:]))
        assert last > first


def test_the_command_writes_a_head_that_fits(model, engine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "vllm_answers", engine)
    line = f"--model {model} --work {tmp_path} --parts 2 --part-size 6 --max-answer-tokens 12"
    line += " --draft-vocab-size 256 --batch-tokens 100"
    command.main(line.split())
    head = tmp_path / "head"
    check_head(head, model)
    assert capsys.readouterr().out == f"wrote {head}\n"
    record = json.loads((head / "training.json").read_text())
    assert record["conversations"] == 12 and record["recipe"]["max_answer_tokens"] == 12
    packaged, made = (
        json.loads((directory / "config.json").read_text()) for directory in (PACKAGED_HEAD, head)
    )
    assert made.keys() == packaged.keys()
    assert made["speculators_config"].keys() == packaged["speculators_config"].keys()
    assert made["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert made["transformer_layer_config"]["hidden_size"] == tiny_models.HIDDEN
    names = load_file(PACKAGED_HEAD / "model.safetensors").keys()
    tensors = load_file(head / "model.safetensors")
    assert tensors.keys() == names - {"fc_norm.3.weight"}, "the tiny target has three states"
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    with pytest.raises(SystemExit, match="name another --work"):
        command.main([*line.split(), "--max-answer-tokens", "13"])


@torch.inference_mode()
def accepted_drafts(target, head, prompt, answer, count):
    """How many of `count` drafts each step of a greedy answer accepts, strictly, without vLLM.

    A draft counts only where all before it in its step are the target's own tokens, so one pass of
    the head over the target's tokens gives all guesses that matter.
    """
    tokens = torch.tensor(prompt + answer)
    following = functional.pad(tokens[1:], (0, count + 1), value=-1)
    embeddings = target.embedding[following.clamp(min=0)][None]
    steps = head.steps(target.states(tokens[None]), embeddings, count)
    guesses = [head.draft_tokens[head.lm_head(hidden[0]).argmax(-1)] for hidden in steps]
    right = [one == following[at : at + len(tokens)] for at, one in enumerate(guesses, 1)]
    accepted = torch.stack(right).int().cumprod(0).sum(0).tolist()
    found, place = [], len(prompt) - 1
    # The prefill gives the first token; a step emits its accepted drafts and one token more.
    while place < len(tokens) - 2:
        found.append(accepted[place])
        place += accepted[place] + 1
    return found


@pytest.mark.engine
@pytest.mark.nightly
def test_vllm_drafts_what_we_expect_of_the_head(model, target, answer, tmp_path, monkeypatch):
    """Positions, inputs and hidden states agree if the counts of acceptance do."""
    asked = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]
    rng = random.Random(0)
    drawn = asked + [[rng.randrange(3, 512) for _ in range(6)] for _ in range(40)]
    # All heads shall look at their own token.
    monkeypatch.setattr(start, "FREE_HEADS", 0)
    head = new_head(target, torch.arange(500))
    pairs = list(zip(drawn, answer(drawn, [0.0] * 43, 60, 0), strict=True))
    start.start_linear(head, target, make_batches(pairs, Recipe()))
    export(head, tmp_path / "head", model, num_speculative_tokens=3, dtype=torch.float32)
    answers = answer(asked, [0.0] * 3, 100, 0)
    taken = []
    for prompt, tokens in zip(asked, answers, strict=True):
        taken += accepted_drafts(target, head, prompt, tokens, 3)
    given = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    with engine_in_process(model, given, max_num_seqs=1, enable_prefix_caching=False) as llm:
        options = {"max_tokens": 100, "ignore_eos": False, "stop_token_ids": [END]}
        assert greedy_tokens(llm, asked, **options) == answers
        metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert 1 + sum(taken) / len(taken) > 1.2
    # The engine also drafts past the end of an answer, once at most.
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    assert abs(drafts - len(taken)) <= len(asked)
    seen = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    for place, accepted in enumerate(seen):
        assert abs(accepted - sum(count > place for count in taken)) <= len(asked)


@pytest.mark.engine
@pytest.mark.nightly
def test_the_engine_answers_as_transformers_does(model, answer):
    asked = [[5, 6, 7, 8], [100, 3, 200, 9]]
    with vllm_answers(model) as ask:
        greedy, sampled = (ask(asked, [heat] * 2, 20, 0) for heat in (0.0, 1.0))
        # Of more tokens than a step takes, so that a prompt is cut.
        many = ask([[token] * 400 for token in range(30, 50)], [1.0] * 20, 4, 0)
    multiprocessing.active_children()
    assert greedy == answer(asked, [0.0] * 2, 20, 0)
    assert sampled != greedy
    assert all(many)
