"""The model card of a head, from the record of its training."""

from typing import Any

CARD = """# EAGLE-3 head for {name}

A draft head of one layer, distilled from the target's own answers by `python -m benchmarks.draft`
({commit}); see docs/draft.md. The full record is training.json.

| | |
| --- | --- |
| target | {name}, model.safetensors with sha256 `{sha256}`; refused for others |
| size | {parameters:,} parameters, bfloat16, {draft_vocab:,} draft tokens |
| data | {answer_tokens:,} tokens, answers in {conversations:,} conversations, {greedy:.0%} greedy |
| prompts | templates of this project, seed {data_seed}{prompt_file}; none that is measured on |
| training | {steps:,} of {planned_steps:,} steps, seed {seed}, {seen_tokens:,.0f} tokens seen |
| time | {minutes:.0f} minutes on {device} |
| loss by drafting step | {loss} |
| right guesses by drafting step | {accuracy} |

Losses and guesses are means over the last steps of training, guesses of true tokens fed. What the
head reaches in vLLM is measured apart, by `python -m benchmarks.draft ladder` and `make demo`.
Its answers are the target's: strict verification gives the target's text whatever a head guesses.
"""


def model_card(record: dict[str, Any]) -> str:
    """Returns README.md of a head.

    Args:
        record: the content of training.json.
    """
    data, train, last = record["data"], record["train"], record["last_steps"]
    return CARD.format(
        name=record["target"]["name"],
        sha256=record["target"]["sha256"],
        commit=f"commit {record['git_commit']}",
        parameters=record["parameters"],
        draft_vocab=record["draft_vocab_size"],
        answer_tokens=data["answer_tokens"],
        conversations=data["shards"] * data["shard_prompts"],
        greedy=data["greedy_share"],
        data_seed=data["seed"],
        prompt_file=" and a file of prompts" if data["prompt_file"] else "",
        steps=record["steps"],
        planned_steps=record["planned_steps"],
        seed=train["seed"],
        seen_tokens=record["seen_tokens"],
        minutes=record["training_seconds"] / 60,
        device=record["device"],
        loss=" ".join(f"{value:.2f}" for value in last["loss"]),
        accuracy=" ".join(f"{value:.2f}" for value in last["accuracy"]),
    )
