"""Drafts of low quality beside a trained head: what does the margin add to each?

layers-4     the target's first 4 layers, its norm and its output, as a draft model
random       an EAGLE-3 head with random weights
linear       a head that guesses by least squares, where training starts
"""

from pathlib import Path

from benchmarks.draft.data import finished_shards
from benchmarks.draft.export import export, load
from benchmarks.draft.head import new_head
from benchmarks.draft.start import start_linear
from benchmarks.draft.target import Target
from vllm_mars.local.draft_head import best_length, check_head, model_checksum

FIRST_LAYERS = 4


def write_untrained(model: Path, trained: Path, data: Path, output: Path) -> list[Path]:
    """Writes the drafts; those that are there are left alone.

    Args:
        model: the target's directory.
        trained: the directory of a head for it, whose sizes and draft tokens the heads take.
        data: where the shards are that the linear head is fitted on; without any it is left out.
        output: each draft gets a directory here, by its name.

    Returns:
        The drafts' directories.

    Raises:
        ValueError: the head is damaged or for another target, or the target has too few layers.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_head(trained, model)
    layers = output / f"layers-{FIRST_LAYERS}"
    like = load(trained)
    target = Target(model, like.config.aux_layers)
    if target.config.num_hidden_layers <= FIRST_LAYERS:
        raise ValueError(
            f"model={model} has {target.config.num_hidden_layers} layers, of which the first "
            f"{FIRST_LAYERS} shall be a draft; take a deeper one."
        )
    if not layers.is_dir():
        AutoTokenizer.from_pretrained(model).save_pretrained(layers)
        first = AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=FIRST_LAYERS)
        first.save_pretrained(layers)
    written = [layers]
    shards = finished_shards(data)
    for name in ("random", "linear") if shards else ("random",):
        written.append(output / name)
        if written[-1].is_dir():
            continue
        head = new_head(
            target,
            like.draft_tokens,
            intermediate_size=like.config.intermediate_size,
            num_key_value_heads=like.config.num_key_value_heads,
        )
        if name == "linear":
            start_linear(head, target, shards[:1])
        export(
            head,
            written[-1],
            target_name=model.name,
            target_sha256=model_checksum(model),
            num_speculative_tokens=best_length(trained),
        )
    return written
