"""Distils a target into an EAGLE-3 head: training-time test on the target's own answers.

Each batch drafts from every token of the answers at once, some steps ahead; the loss is the
cross-entropy of each guess with the target's distribution over the draft vocabulary. Where the
token of the text is no draft token nothing is learned, and the position counts as missed.
"""

import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from benchmarks.draft.data import Shard
from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.recipe import Recipe
from benchmarks.draft.target import Target


class Batch(NamedTuple):
    """Sequences of similar length, padded at the end.

    Attributes:
        tokens: [batch, length + steps_ahead + 1] int64.
        states: [batch, length, aux, hidden].
        anchors: [batch, queries] int64, tokens to draft from: from the last token of the prompt.
        valid: [batch, queries] int64, how many tokens follow the one after the anchor.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    anchors: torch.Tensor
    valid: torch.Tensor


def make_batch(
    tokens: list[torch.Tensor],
    states: list[torch.Tensor],
    prompt_tokens: list[int],
    steps_ahead: int,
) -> Batch:
    """Pads sequences into a batch."""
    ends = torch.tensor([len(ids) for ids in tokens])[:, None]
    starts = torch.tensor(prompt_tokens)[:, None]
    padded = functional.pad(pad_sequence(tokens, batch_first=True), (0, steps_ahead + 1))
    # The last anchor is two tokens before the end: one is known, one is guessed.
    queries = int((ends - starts - 1).amax().clamp(min=1))
    anchors = starts - 1 + torch.arange(queries)
    valid = (ends - 2 - anchors).clamp(min=0)
    anchors = anchors.clamp(max=int(ends.amax()) - 1)
    return Batch(padded, pad_sequence(states, batch_first=True), anchors, valid)


class _Float32Muon(TorchFunctionMode):
    """Keeps Muon from rounding to bfloat16, which a CPU without AVX-512 BF16 multiplies slowly."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Muon changes the result in place.
        return args[0].clone() if func is torch.Tensor.bfloat16 else func(*args, **(kwargs or {}))


def train(
    head: Eagle3Head, target: Target, paths: list[Path], recipe: Recipe
) -> Iterator[dict[str, Any]]:
    """Trains a head to the end of the recipe, on shards of data.

    Yields:
        After each step: loss and accuracy by drafting step, tokens seen, and all steps that follow.
    """
    matrices = [weight for weight in head.parameters() if weight.dim() == 2]
    others = [weight for weight in head.parameters() if weight.dim() != 2]
    # The output layer is last, and no matrix to Muon: its rows are tokens.
    others.append(matrices.pop())
    adam, muon, decay = recipe.adam_learning_rate, recipe.learning_rate, recipe.weight_decay
    optimizers = {
        torch.optim.AdamW(others, adam, (0.9, 0.95), weight_decay=decay): adam,
        torch.optim.Muon(matrices, muon, decay, adjust_lr_fn="match_rms_adamw"): muon,
    }
    total = num_steps(recipe)
    for done, batch in zip(range(total), batches(paths, recipe), strict=False):
        factor = min(1.0, (done + 1) / recipe.warm_up)
        factor *= min(1.0, (1 - done / total) / recipe.cool_down)
        for optimizer, peak in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.zero_grad()
        ahead = min(2, recipe.steps_ahead) if done < recipe.ramp * total else recipe.steps_ahead
        losses, correct, counts = batch_losses(head, target, batch, ahead)
        weights = [recipe.step_decay**step / max(1, counts[0]) for step in range(ahead)]
        loss = torch.stack(losses) @ torch.tensor(weights)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        with nullcontext() if target.dtype == torch.bfloat16 else _Float32Muon():
            for optimizer in optimizers:
                optimizer.step()
        yield {
            "loss": [
                float(one.detach()) / max(1, n) for one, n in zip(losses, counts, strict=True)
            ],
            "accuracy": [right / max(1, n) for right, n in zip(correct, counts, strict=True)],
            "tokens": counts[0],
        }


def num_steps(recipe: Recipe) -> int:
    """Returns how many steps a recipe takes."""
    return round(recipe.epochs * recipe.shards * math.ceil(recipe.shard_prompts / recipe.batch))


def batches(paths: list[Path], recipe: Recipe) -> Iterator[Batch]:
    """Yields the batches of all epochs, the last one whole."""
    for number in range(math.ceil(recipe.epochs) * len(paths)):
        epoch, place = divmod(number, len(paths))
        order = list(range(len(paths)))
        if epoch:
            random.Random(f"{recipe.seed} {epoch}").shuffle(order)
        shard = Shard(paths[order[place]])
        # Little padding where the lengths are alike.
        order = sorted(range(len(shard.lengths)), key=shard.lengths.__getitem__)
        size = recipe.batch
        groups = [order[start : start + size] for start in range(0, len(order), size)]
        random.Random(f"{recipe.seed} {epoch} {place}").shuffle(groups)
        content: tuple[Any, ...] = (shard.tokens, shard.states, shard.prompt_tokens)
        for group in groups:
            tokens, states, prompts = ([of[index] for index in group] for of in content)
            yield make_batch(tokens, states, prompts, recipe.steps_ahead)


def batch_losses(
    head: Eagle3Head, target: Target, batch: Batch, ahead: int
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Returns for each drafting step: the summed loss, right guesses, guesses."""
    losses, correct, counts = [], [], []
    to_draft = torch.full((target.config.vocab_size,), -1)
    to_draft[head.draft_tokens] = torch.arange(len(head.draft_tokens))
    embeddings = target.embedding[batch.tokens[:, 1:]]
    with torch.autocast("cpu", enabled=target.dtype == torch.bfloat16):
        # The state one token before the guessed one gives the target's logits. Step j of an
        # anchor guesses what step 0 of the j-th anchor after it does.
        first = batch.valid > 0
        place = torch.full_like(batch.anchors, -1)
        place[first] = torch.arange(int(first.sum()))
        row, after = torch.nonzero(first)[:, 0], batch.anchors[first] + 1
        with torch.no_grad():
            last = target.normed(batch.states[row, after, -1])
            logits = functional.linear(last, target.lm_head[head.draft_tokens])
            wanted = logits.float().softmax(-1)
            chosen = to_draft[batch.tokens[row, after + 1]]
        for step, hidden in enumerate(head.steps(batch.states, embeddings, batch.anchors, ahead)):
            rows = batch.valid > step
            index = place[:, step:][rows[:, : max(0, place.shape[1] - step)]]
            logits = head.lm_head(hidden[rows]).float()
            loss = functional.cross_entropy(logits, wanted[index], reduction="none")
            losses.append((loss * (chosen[index] >= 0)).sum())
            correct.append(int((logits.detach().argmax(-1) == chosen[index]).sum()))
            counts.append(len(index))
    return losses, correct, counts


def choose_draft_tokens(paths: list[Path], size: int, vocab_size: int) -> torch.Tensor:
    """Returns the `size` most frequent tokens of the answers, ascending.

    Where the answers hold fewer, the prompts' tokens and then the lowest ids fill up; a byte-pair
    vocabulary numbers frequent tokens low.
    """
    answers, others = (torch.zeros(vocab_size) for _ in range(2))
    for shard in map(Shard, paths):
        for ids, prompt_tokens in zip(shard.tokens, shard.prompt_tokens, strict=True):
            answers += torch.bincount(ids[prompt_tokens:], minlength=vocab_size)
            others += torch.bincount(ids[:prompt_tokens], minlength=vocab_size)
    rank = answers * (others.sum() + 1) + others
    order = torch.sort(rank, descending=True, stable=True).indices
    return order[:size].sort().values
