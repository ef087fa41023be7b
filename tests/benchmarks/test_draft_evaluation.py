"""What a head is worth, offline and beside the counters of an engine."""

import json
import multiprocessing
import random

import pytest
import torch

from benchmarks.draft import start
from benchmarks.draft.data import save_shard
from benchmarks.draft.evaluate import evaluate_heads, tables
from benchmarks.draft.export import export
from benchmarks.draft.head import new_head
from benchmarks.tree_cells import STRICT, DraftShape, Study
from tiny_draft import greedy
from vllm_mars.local.draft_head import best_length, model_checksum
from vllm_mars.local.drafts import CHOSEN_BY_REQUESTS
from vllm_mars.local.vllm_args import CPU_ENGINE_ARGS


def test_heads_are_measured_once_strictly_and_by_price(model, target, shards, tmp_path):
    paths = [shards / "00000.safetensors"]
    head = new_head(target, torch.arange(256))
    for name in ("random", "linear"):
        if name == "linear":
            start.start_linear(head, target, paths)
        export(
            head,
            tmp_path / name,
            target_name="tiny",
            target_sha256=model_checksum(model),
            num_speculative_tokens=3,
        )
    (tmp_path / "linear" / "training.json").write_text(
        '{"steps": 7, "train": {"loss": "price", "steps_ahead": 5}}'
    )
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("\n".join(json.dumps({"prompt": f"w{n} w9 w{n}"}) for n in range(9, 15)))
    heads, output = [tmp_path / "random", tmp_path / "linear"], tmp_path / "out.json"

    def measure(heads=heads, **changes):
        given = {"max_tokens": 16, "steps": 3, "prices": [0.0, 8.0], **changes}
        return evaluate_heads(model, heads, asked, output, **given)

    result = measure(heads[:1])
    assert [cell["rule"] for cell in result["cells"]] == ["strict", "price 8"]
    first = result["cells"][0]
    result = measure()
    assert json.loads(output.read_text()) == json.loads(json.dumps(result))
    assert result["cells"][0] == first
    _, _, strict, price = result["cells"]
    assert strict["head"] == "linear" and strict["lost"] == [0] * 6
    assert strict["trained"] == {"steps": 7, "loss": "price", "steps_ahead": 5}
    assert sum(price["lost"]) > 0 and sum(price["relaxed"]) > 0
    for cell in (strict, price):
        # Each step emits what it accepts and one more, but where an answer ends.
        emitted = [sum(row) + n for row, n in zip(cell["accepted"], cell["steps"], strict=True)]
        assert all(0 <= e - t <= 3 for e, t in zip(emitted, cell["tokens"], strict=True))
    lines = tables(result)
    by_rule = lines["rules"][2:]
    assert [line.split(" | ")[0] for line in by_rule] == ["| random"] * 2 + ["| linear"] * 2
    assert by_rule[2].startswith("| linear | strict | ")
    assert result["cells"][2]["trained"] == {"steps": 7, "steps_ahead": 5, "loss": "price"}
    # The first head is compared with itself.
    random, linear = (line.split(" | ") for line in lines["heads"][2:])
    assert random[0] == "| random" and random[2:4] == ["1.000", "1.000"]
    assert float(linear[2].split()[0]) > 1
    assert len(measure(prices=[0.0, 1.0])["cells"]) == 6
    with pytest.raises(ValueError, match=r"out\.json holds another measurement; name another"):
        measure(steps=2)
    with pytest.raises(ValueError, match=r"heads have one name; give each a directory of its own"):
        measure([heads[0], heads[0]])


def verified(model, head, given, max_tokens, thetas):
    """The answers of vLLM to each prompt by itself, and its counters, at each theta."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": best_length(head),
            **CHOSEN_BY_REQUESTS["theta"],
        },
        **CPU_ENGINE_ARGS,
    )

    def counters():
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        drafts = metrics["vllm:spec_decode_num_drafts"].value
        return [drafts, *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values]

    found = []
    try:
        for theta in thetas:
            sampling = SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                detokenize=False,
                stop_token_ids=[2],
                extra_args={"mars_theta": theta},
            )
            before = counters()
            prompts = [{"prompt_token_ids": prompt} for prompt in given]
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            drafts, *accepted = (now - then for now, then in zip(counters(), before, strict=True))
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            found.append({"tokens": tokens, "drafts": drafts, "accepted": accepted})
    finally:
        llm.llm_engine.engine_core.shutdown()
        # Waits for what has ended.
        multiprocessing.active_children()
    return found


@pytest.mark.engine
@pytest.mark.nightly
def test_vllm_drafts_what_we_expect_of_the_head(model, target, tmp_path, monkeypatch):
    """Positions, inputs and hidden states agree if the counts of acceptance do."""
    given = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]
    rng = random.Random(0)
    drawn = [[rng.randrange(3, 512) for _ in range(6)] for _ in range(40)]
    save_shard(tmp_path / "shard", greedy(target, given + drawn, 60))
    # All heads shall look at their own token.
    monkeypatch.setattr(start, "FREE_HEADS", 0)
    head = new_head(target, torch.arange(500))
    start.start_linear(head, target, [tmp_path / "shard"])
    export(
        head,
        tmp_path / "head",
        target_name="tiny",
        target_sha256=model_checksum(model),
        num_speculative_tokens=3,
        dtype=torch.float32,
    )
    given = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]
    max_tokens = 100
    answers = greedy(target, given, max_tokens)
    study = Study(model, tmp_path / "head", given, max_tokens)
    walked = study.answer(STRICT, DraftShape("chain", 3))
    taken = [count for answer in walked for count in answer.accepted]
    strict, relaxed = verified(model, tmp_path / "head", given, max_tokens, (1.0, 0.5))
    assert strict["tokens"] == [
        sequence.tokens[sequence.prompt_tokens :].tolist() for sequence in answers
    ]
    assert 1 + sum(taken) / len(taken) > 1.2
    # The engine also drafts past the end of an answer, once at most.
    assert abs(strict["drafts"] - len(taken)) <= len(given)
    for place, seen in enumerate(strict["accepted"]):
        assert abs(seen - sum(count > place for count in taken)) <= len(given)
    strict_length, relaxed_length = (
        sum(counts["accepted"]) / counts["drafts"] for counts in (strict, relaxed)
    )
    assert relaxed_length > strict_length
