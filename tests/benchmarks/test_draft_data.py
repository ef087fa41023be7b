"""The data that a draft is trained on: its prompts, and that each shard can be made again."""

import json
import random
import re
from dataclasses import replace

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close as close

from benchmarks.draft import data, pipeline, prompts
from benchmarks.draft.data import file_prompts, make_shard, shard_path, write_manifest
from benchmarks.draft.target import Target
from tiny_draft import DATA, decode, encode
from vllm_mars.local.prompts import load_prompts


def test_a_shard_follows_from_seed_and_number(target, shards, tmp_path):
    for number in (0, 2):
        if number:
            (tmp_path / "00000.jsonl").write_bytes((shards / "00000.jsonl").read_bytes())
        assert make_shard(tmp_path, number, DATA, target, encode, decode)
        made, expected = (load_file(shard_path(place, number)) for place in (tmp_path, shards))
        assert made.keys() == expected.keys()
        for name, tensor in expected.items():
            # The library of linear algebra may round a product otherwise from call to call.
            rounding = 2**-7 if name == "states" else 0
            close(made[name], tensor, rtol=rounding, atol=rounding / 64)
        text = f"{number:05d}.jsonl"
        assert (tmp_path / text).read_text() == (shards / text).read_text()
    assert not make_shard(tmp_path, 2, DATA, target, encode, decode)
    other = tmp_path / "other"
    other.mkdir()
    make_shard(other, 1, replace(DATA, seed=1), target, encode, decode)
    assert (other / "00001.jsonl").read_text() != (shards / "00001.jsonl").read_text()


def test_a_file_that_is_not_finished_does_not_stay(tmp_path):
    with pytest.raises(KeyboardInterrupt), data.replacing(tmp_path / "a") as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_data_of_other_options_is_refused(tmp_path, monkeypatch):
    write_manifest(tmp_path, DATA, "abc")
    write_manifest(tmp_path, replace(DATA, shards=9), "abc")
    with pytest.raises(ValueError, match=r"holds data made with max_tokens=12, not 13; name"):
        write_manifest(tmp_path, replace(DATA, max_tokens=13), "abc")
    with pytest.raises(ValueError, match=r"holds data made with target_sha256='abc', not 'abd'"):
        write_manifest(tmp_path, DATA, "abd")
    monkeypatch.setattr(prompts, "TEMPLATES", pipeline.Path(data.__file__))
    with pytest.raises(ValueError, match=r"holds data made with templates_sha256='"):
        write_manifest(tmp_path, DATA, "abc")


def test_the_demos_prompts_are_no_training_prompts(tmp_path):
    measured = {turn for prompt in load_prompts() for turn in prompt.turns}
    rng = random.Random(0)
    drawn = {prompts.draw(rng, [])[-1]["content"] for _ in range(2000)}
    assert not measured & drawn
    assert len(drawn) > 1900
    fields = "|".join([*prompts.DATA["fields"], "passage"])
    assert not [text for text in drawn if re.search(rf"\{{({fields})\}}", text)]
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Say hello."}\n')
    assert file_prompts(path) == ["Say hello."]
    path.write_text(json.dumps({"id": "x", "prompt": sorted(measured)[0]}) + "\n")
    with pytest.raises(ValueError, match=r"x is one of the demo's prompts, .* remove it"):
        file_prompts(path)


def test_follow_ups_and_passages_come_from_earlier_answers():
    rng = random.Random(0)
    earlier = [([{"role": "user", "content": "Q"}], "One red fox. Two red foxes. Three. Cut")]
    drawn = [prompts.draw(rng, earlier) for _ in range(500)]
    follow_ups = [messages for messages in drawn if len(messages) == 3]
    assert 30 < len(follow_ups) < 90
    assert follow_ups[0][1] == {"role": "assistant", "content": earlier[0][1]}
    assert sum("Two red foxes." in messages[-1]["content"] for messages in drawn) > 10
    assert not any("Cut" in messages[-1]["content"] for messages in drawn)


def test_the_target_writes_tasks_that_a_later_shard_sets(target, tmp_path, monkeypatch):
    request = [{"role": "user", "content": prompts.DATA["task_request"] + " about tea."}]
    assert prompts.asks_for_a_task(request)
    measured = next(iter(data.measured_turns()))
    lines = [
        {"messages": request, "answer": answer} for answer in ("Why is tea green? \n", measured)
    ]
    (tmp_path / "00000.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(prompts, "FOLLOW_UP_SHARE", 0.0)
    monkeypatch.setattr(prompts, "OWN_TASK_SHARE", 1.0)
    made = []
    monkeypatch.setattr(Target, "answer", lambda self, ids, heat, *_: made.append(heat) or [])
    monkeypatch.setattr(data, "save_shard", lambda path, answers: None)
    assert make_shard(tmp_path, 2, DATA, target, encode, decode)
    rng = random.Random(0)
    drawn = data._draw(tmp_path, 2, DATA, encode, rng)
    assert {messages[-1]["content"] for messages, _ in drawn} == {"Why is tea green?"}
    monkeypatch.setattr(prompts, "draw", lambda rng, earlier: request)
    assert make_shard(tmp_path, 2, DATA, target, encode, decode)
    assert made[3:] == [[1.0] * 5, [1.0] * 5, [1.0] * 2]
