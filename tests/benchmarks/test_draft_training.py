"""The making of an EAGLE-3 head, on a tiny target: losses, training, resuming, export."""

import json
from argparse import Namespace
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

import tiny_models
from benchmarks.draft import __main__ as command
from benchmarks.draft import pipeline, start, untrained
from benchmarks.draft.data import (
    Shard,
    save_shard,
)
from benchmarks.draft.export import export, load, megabytes
from benchmarks.draft.head import new_head
from benchmarks.draft.loss import distillation_loss, price_loss
from benchmarks.draft.train import Batch, Trainer, TrainOptions, choose_draft_tokens
from benchmarks.draft.untrained import write_untrained
from tiny_draft import AUX, DATA, greedy
from vllm_mars.local.draft_head import best_length, check_head, model_checksum

TRAIN = TrainOptions(shards=2, epochs=1.0, steps_ahead=3, batch=4, warm_up=2, checkpoint_every=3)


def trainer(directory, target, shards, options=TRAIN):
    paths = [shards / f"{number:05d}.safetensors" for number in range(DATA.shards)]
    head = new_head(target, choose_draft_tokens(paths, 256, tiny_models.VOCAB))
    start.start_linear(head, target, paths[:1])
    made = Trainer(directory, options, target, head, paths.__getitem__, DATA.shard_prompts)
    made.resume()
    return made


def test_answers_and_states_are_those_of_transformers(model, target):
    given = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]
    reference = LlamaForCausalLM.from_pretrained(model)
    for sequence in greedy(target, given, 20):
        with torch.inference_mode():
            output = reference(sequence.tokens[None], output_hidden_states=True)
        start = sequence.prompt_tokens
        assert sequence.tokens[:start].tolist() == given[sequence.index]
        assert len(sequence.tokens) - start == 20 or sequence.tokens[-1] == 2
        assert torch.equal(sequence.tokens[start:], output.logits[0, start - 1 : -1].argmax(-1))
        # transformers gives its last state after the norm, the others as they are.
        for index in range(2):
            expected = output.hidden_states[index][0, :-1]
            torch.testing.assert_close(sequence.states[:, index], expected, rtol=1e-4, atol=1e-5)
        last = reference.model.norm(sequence.states[:, 2])
        torch.testing.assert_close(last, output.hidden_states[2][0, :-1], rtol=1e-4, atol=1e-4)


def test_sampled_answers_follow_the_seed(target):
    def sampled(seed):
        generator = torch.Generator().manual_seed(seed)
        found = target.answer([[9, 8, 7]] * 6, [1.0] * 6, 16, generator)
        return sorted((sequence.index, sequence.tokens.tolist()) for sequence in found)

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert len({tuple(tokens) for _, tokens in sampled(1)}) > 1


def test_losses_by_hand():
    target = torch.tensor([[3.0, 2.0, 2.5, -50.0]] * 2)
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.5, 0.25]]).log()
    p = target[0].softmax(0)
    expected = -(p * logits).sum(1)
    torch.testing.assert_close(distillation_loss(logits, target), expected)
    # What costs a price is right e^-1 of the time, what costs half of one e^-0.5.
    e = torch.tensor(-0.5).exp()
    right = torch.stack([0.5 + 0.25 * e**2 + 0.125 * e, 0.125 + 0.125 * e**2 + 0.5 * e])
    torch.testing.assert_close(price_loss(logits, target, 1.0), -right.log())


def test_the_gradient_of_the_price_and_its_limits():
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(2, 8, 40, generator=generator) * 3
    logits.requires_grad_(True)
    (gradient,) = torch.autograd.grad(price_loss(logits, target, 0.3).sum(), logits)
    q = logits.softmax(-1)
    cost = target.amax(-1, keepdim=True) - target
    goal = q * (-cost / 0.3).exp()
    torch.testing.assert_close(gradient, q - goal / goal.sum(-1, keepdim=True))
    first = torch.nn.functional.cross_entropy(logits, target.argmax(-1), reduction="none")
    torch.testing.assert_close(price_loss(logits, target, 1e-4), first)
    assert (price_loss(logits, target, 1e6) < 1e-4).all()
    for price in (0.1, 1.0, 10.0):
        loss = price_loss(logits, target, price)
        assert (loss <= (q * cost).sum(-1) / price + 1e-6).all()
        assert (loss <= first + 1e-6).all() and (loss >= 0).all()


def test_an_interrupted_run_ends_with_the_same_head(target, shards, tmp_path):
    whole = trainer(tmp_path / "whole", target, shards)
    whole.run(report=lambda figures: None)
    assert whole.done == whole.total == 6
    parts = trainer(tmp_path / "parts", target, shards)
    parts.run(4, lambda figures: None)
    again = trainer(tmp_path / "parts", target, shards)
    assert again.done == 4
    steps = []
    again.run(report=lambda figures: steps.append(figures["step"]))
    assert steps == [5, 6]
    for one, other in zip(whole.head.parameters(), again.head.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match=r"is of a run with batch=4, not 5; name another"):
        trainer(tmp_path / "parts", target, shards, replace(TRAIN, batch=5))
    with pytest.raises(ValueError, match=r"is of a run with loss='distil', not 'price'; name"):
        trainer(tmp_path / "parts", target, shards, replace(TRAIN, loss="price"))
    # Other states of the same size would fit without a word.
    again.head.config.aux_layers = (0, 2, 2)
    with pytest.raises(
        ValueError, match=r"is of a run with fed_layers=\[0, 1, 2\], not \[0, 2, 2\]"
    ):
        again.resume()


def test_a_killed_run_ends_with_the_same_head(target, shards, tmp_path):
    """Between two checkpoints, and while one is written."""
    whole = trainer(tmp_path / "whole", target, shards)
    whole.run(report=lambda figures: None)
    killed = trainer(tmp_path / "killed", target, shards)

    def kill(figures):
        if figures["step"] == 5:
            raise SystemExit

    with pytest.raises(SystemExit):
        killed.run(report=kill)
    (tmp_path / "killed" / "checkpoint.pt.tmp-1").write_bytes(b"half")
    again = trainer(tmp_path / "killed", target, shards)
    assert again.done == 3
    again.run(report=lambda figures: None)
    for one, other in zip(whole.head.parameters(), again.head.parameters(), strict=True):
        assert torch.equal(one, other)
    assert again.log_sum("tokens") == whole.log_sum("tokens")


@pytest.mark.parametrize("loss", ["distil", "price"])
def test_training_lowers_the_loss_of_each_step(target, shards, tmp_path, loss):
    options = replace(TRAIN, epochs=6.0, ramp=0.0, loss=loss, price=1.0)
    made = trainer(tmp_path, target, shards, options)
    figures = []
    made.run(report=figures.append)
    for step in range(3):
        first, last = (
            sum(line["loss"][step] for line in part) for part in (figures[:6], figures[-6:])
        )
        assert last < first
    assert made.data_tokens()["answer_tokens"] > 100
    assert len(made.log_means(4)["accuracy"]) == 3


def test_float32_training_multiplies_in_float32(target, shards, tmp_path):
    class Products(TorchDispatchMode):
        dtypes: ClassVar[set[torch.dtype]] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                self.dtypes.add(out.dtype)
            return out

    assert target.dtype == torch.float32
    started = trainer(tmp_path, target, shards)
    before = [matrix.clone() for matrix in started.head.parameters()]
    with Products() as products:
        started.run(until=1)
    assert products.dtypes == {torch.float32}
    assert not any(map(torch.equal, before, started.head.parameters()))


def test_the_pipeline_writes_the_half_trained_and_the_trained_head(model, target, shards, tmp_path):
    (tmp_path / "data").symlink_to(shards)
    setting = replace(
        pipeline.SETTINGS["cpu"], data=replace(DATA, shards=2), train=TRAIN, draft_vocab_size=256
    )
    trained = pipeline.train(tmp_path, model, setting, target)
    pipeline.write(trained, tmp_path / "head", model, setting)
    for name in ("head", "half"):
        check_head(tmp_path / name, model)
        assert best_length(tmp_path / name) == 4
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert (record["steps"], record["planned_steps"]) == (6, 6)
    assert json.loads((tmp_path / "half" / "training.json").read_text())["steps"] == 3
    card = (tmp_path / "head" / "README.md").read_text()
    assert f"sha256 `{model_checksum(model)}`" in card
    assert "6 of 6 steps, seed 0" in card
    with pytest.raises(ValueError, match=r"holds data made with max_tokens=12, not 13"):
        other = replace(setting, data=replace(setting.data, max_tokens=13))
        pipeline.train(tmp_path, model, other, target)


def test_a_head_is_trained_on(model, target, shards, tmp_path, capsys):
    (tmp_path / "data").symlink_to(shards)
    setting = replace(
        pipeline.SETTINGS["cpu"], data=replace(DATA, shards=2), train=TRAIN, draft_vocab_size=256
    )
    first = pipeline.train(tmp_path, model, setting, target)
    pipeline.write(first, tmp_path / "first", model, setting)
    train = replace(TRAIN, start_from=str(tmp_path / "first"))
    with pytest.raises(ValueError, match=r"is of a run with start_from=None, not "):
        pipeline.train(tmp_path, model, replace(setting, train=train), target)
    # So small a rate leaves it as it was.
    slow = replace(train, learning_rate=1e-9, adam_learning_rate=1e-9, loss="price")
    again = replace(setting, train=slow, draft_vocab_size=64)
    (tmp_path / "train").rename(tmp_path / "before")
    trained = pipeline.train(tmp_path, model, again, target)
    was = load(tmp_path / "first")
    assert torch.equal(trained.head.draft_tokens, was.draft_tokens)
    for one, other in zip(trained.head.parameters(), was.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    pipeline.write(trained, tmp_path / "second", model, again)
    record = json.loads((tmp_path / "second" / "training.json").read_text())
    assert record["train"]["start_from"] == "first"
    assert "3 drafting steps, from the head first |" in (tmp_path / "second/README.md").read_text()
    line = f"make --setting cpu --model {model} --start-from {tmp_path} --draft-vocab-size 64"
    assert command.main(line.split()) == 1
    assert "draft_vocab_size=64 beside start_from=" in capsys.readouterr().err


def test_what_the_command_line_names(model, target, shards, tmp_path):
    """Seven steps ahead, by price, of a part of what was kept: in the head and on its card."""
    (tmp_path / "data").symlink_to(shards)
    line = "make --setting cpu --steps-ahead 7 --loss price --price 0.5 --draft-vocab-size 128"
    line += " --fed-layers 0 2 --intermediate-size 64 --num-speculative-tokens 5 --dtype float32"
    args = command._parser().parse_args(line.split())
    given = pipeline.SETTINGS["cpu"]
    setting = command._with(args, given)
    train = command._with(args, replace(TRAIN, ramp=0.0))
    assert (train.steps_ahead, train.loss, train.price) == (7, "price", 0.5)
    assert command._with(args, given.data) == replace(given.data, dtype="float32")
    assert command._with(Namespace(), given) == given
    setting = replace(setting, data=replace(DATA, shards=2), train=train)
    trained = pipeline.train(tmp_path, model, setting, target)
    pipeline.write(trained, tmp_path / "head", model, setting)
    check_head(tmp_path / "head", model)
    assert best_length(tmp_path / "head") == 5
    head = load(tmp_path / "head")
    assert (head.config.aux_layers, len(head.draft_tokens)) == ((0, 2), 128)
    assert head.config.intermediate_size == 64
    size = (tmp_path / "head" / "model.safetensors").stat().st_size / 1e6
    assert megabytes(head) == pytest.approx(size, abs=5e-3)
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert len(record["last_steps"]["loss"]) == 7
    card = (tmp_path / "head" / "README.md").read_text()
    assert "at layers 0, 2 |" in card and "7 drafting steps |" in card
    assert "by price, 0.5 nats |" in card and "128 draft tokens" in card


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fed_layers": (0, 3)}, r"fed_layers=\(0, 3\) must ascend from 0 or more to 2"),
        ({"fed_layers": (0, 1)}, r"fed_layers=\(0, 1\) must ascend .* last state"),
        ({"data": replace(DATA, aux_layers=(2, 0))}, r"aux_layers=\(2, 0\) must ascend"),
        (
            {"data": replace(DATA, aux_layers=(0, 2)), "fed_layers": (1, 2)},
            r"fed_layers=\(1, 2\) are not all in the data's aux_layers=\(0, 2\)",
        ),
        (
            {"draft_vocab_size": 128, "max_mb": 0.1},
            r"draft_vocab_size=128 has 0\.\d MB, above max_mb=0\.1; take fewer draft tokens or",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(model, change, message):
    setting = replace(pipeline.SETTINGS["cpu"], **{"data": DATA, **change})
    with pytest.raises(ValueError, match=message):
        pipeline.read_target(model, setting)


def test_the_hidden_states_follow_from_the_depth_of_the_target(model, tmp_path):
    given = pipeline.SETTINGS["cpu"]
    assert pipeline.for_target(given, model).data.aux_layers == AUX
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    assert pipeline.for_target(given, tmp_path) == given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "hard"}, r"loss='hard' is unknown; take 'distil' or 'price'"),
        ({"price": 0.0}, r"price=0\.0 is not above 0"),
        ({"batch": 0}, r"batch=0 is not above 0"),
        ({"epochs": -1.0}, r"epochs=-1\.0 is not above 0"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TRAIN, **change)


def test_a_linear_start_needs_the_last_state_and_a_value_for_each_head(target, shards):
    paths = [shards / "00000.safetensors"]
    tokens = torch.arange(256)
    with pytest.raises(ValueError, match=r"aux_layers=\(0, 1\) does not end with .* state, 2"):
        start.start_linear(new_head(target, tokens, aux_layers=(0, 1)), target, paths)
    with pytest.raises(ValueError, match=r"num_key_value_heads=2 is not num_attention_heads=4"):
        start.start_linear(new_head(target, tokens, num_key_value_heads=2), target, paths)


def test_untrained_drafts(model, target, shards, tmp_path, monkeypatch):
    trained = tmp_path / "trained"
    head = new_head(target, torch.arange(256))
    export(
        head,
        trained,
        target_name="tiny",
        target_sha256=model_checksum(model),
        num_speculative_tokens=3,
    )
    with pytest.raises(ValueError, match=r"has 2 layers, of which the first 4 .* take a deeper"):
        write_untrained(model, trained, shards, tmp_path)
    monkeypatch.setattr(untrained, "FIRST_LAYERS", 1)
    found = write_untrained(model, trained, shards, tmp_path)
    assert [path.name for path in found] == ["layers-1", "random", "linear"]
    layers, *heads = found
    for path in heads:
        check_head(path, model)
        assert best_length(path) == 3
    random_head, linear = map(load, heads)
    expected = new_head(target, torch.arange(256))
    start.start_linear(expected, target, [shards / "00000.safetensors"])
    for name, weight in expected.bfloat16().float().state_dict().items():
        assert torch.equal(linear.state_dict()[name], weight)
    assert not torch.equal(random_head.fc.weight, linear.fc.weight)
    # The first layer's output, through the target's norm and output.
    whole, first = map(LlamaForCausalLM.from_pretrained, (model, layers))
    with torch.inference_mode():
        ids = torch.tensor([[5, 6, 7, 8]])
        state = whole(ids, output_hidden_states=True).hidden_states[1]
        torch.testing.assert_close(first(ids).logits, whole.lm_head(whole.model.norm(state)))
    written = [path.stat().st_mtime_ns for one in found for path in one.iterdir()]
    assert write_untrained(model, trained, shards, tmp_path) == found
    assert written == [path.stat().st_mtime_ns for one in found for path in one.iterdir()]
    assert len(write_untrained(model, trained, tmp_path, tmp_path / "no-data")) == 2


def test_anchors_end_where_nothing_is_left_to_guess():
    states = [torch.zeros(6, 3, 8), torch.zeros(4, 3, 8)]
    batch = Batch.of([torch.arange(6), torch.arange(4)], states, [2, 2], 3, "cpu")
    # The first drafts after token 1, the prompt's last, knowing token 2: tokens 3, 4 and 5.
    assert batch.anchors[0].tolist() == [1, 2, 3]
    assert batch.valid.tolist() == [[3, 2, 1], [1, 0, 0]]


def test_answers_shorter_than_what_is_drafted(target, tmp_path):
    for tokens in (1, 3):
        save_shard(tmp_path / f"{tokens // 2}", greedy(target, [[5, 6], [7, 8]], tokens))
    options = replace(TRAIN, shards=2, steps_ahead=7, ramp=0.0)
    head = new_head(target, torch.arange(512))
    made = Trainer(tmp_path, options, target, head, lambda number: tmp_path / f"{number}", 2)
    lines = []
    made.run(report=lines.append)
    assert [line["tokens"] for line in lines] == [0, 4]
    assert all(parameter.isfinite().all() for parameter in made.head.parameters())


def test_drafting_from_all_tokens_at_once_equals_one_after_the_other(target, shards):
    """The masks of the training steps against plain decoding with a growing cache."""
    paths = [shards / "00000.safetensors"]
    head = new_head(target, torch.arange(256), num_key_value_heads=2)
    tokens, states = (parts[0] for parts in Shard(paths[0]).read())
    batch = Batch.of([tokens], [states], [4], 3, "cpu")
    embeddings = target.embedding[batch.tokens[:, 1:]]
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("o_proj.weight"):
                torch.nn.init.normal_(parameter, std=0.2)
        together = list(head.steps(batch.states, embeddings, batch.anchors, 3))
        for column, anchor in enumerate(batch.anchors[0].tolist()):
            # Only what is known at the anchor: nothing after it may matter.
            alone = head.steps(
                batch.states[:, : anchor + 1],
                embeddings[:, : anchor + 4],
                torch.tensor([[anchor]]),
                3,
            )
            for step, hidden in enumerate(alone):
                torch.testing.assert_close(
                    together[step][:, column], hidden[:, 0], rtol=1e-3, atol=1e-4
                )
