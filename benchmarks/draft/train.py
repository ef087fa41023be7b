"""Distils a target into an EAGLE-3 head: training-time test on the target's own answers.

Each batch drafts from every token of the answers at once, some steps ahead, and a loss (`loss.py`)
compares each guess with the target's logits over the draft vocabulary. Where the token of the text
is no draft token nothing is learned, and the position counts as missed.

A run is a plan of steps that follows from its options alone, so that one that was interrupted goes
on at its last checkpoint and ends with the same head. It waits for shards that are still made.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from benchmarks.draft.data import Shard, check_same, replacing, wait_for
from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.loss import distillation_loss, price_loss
from benchmarks.draft.target import Target

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        seed: of the order of the batches.
        shards: how many shards of the data are used.
        epochs: passes over them; may be a fraction.
        steps_ahead: drafting steps that are trained, at least 1; more or fewer may be drafted.
        start_from: directory of a head that is trained on, whose draft tokens, layers and width it
            keeps; None starts from the linear guess (`start.py`).
        loss: "distil" or "price" (`loss.py`).
        price: of the loss "price", in nats.
        batch: sequences in a batch.
        learning_rate: peak for Muon, which trains the matrices but lm_head.
        adam_learning_rate: peak for AdamW, which trains the rest.
        weight_decay: decoupled.
        warm_up: steps until the peak.
        cool_down: share of the steps in which the rate falls to zero, at the end.
        step_decay: a step's loss weighs this power of it.
        ramp: share of the steps, at the start, that train two drafting steps only, which is faster.
        checkpoint_every: steps between checkpoints.
    """

    seed: int = 0
    shards: int = 12
    epochs: float = 1.0
    steps_ahead: int = 3
    start_from: str | None = None
    loss: str = "distil"
    price: float = 0.3
    batch: int = 16
    learning_rate: float = 2e-3
    adam_learning_rate: float = 3e-4
    weight_decay: float = 0.01
    warm_up: int = 10
    cool_down: float = 0.5
    step_decay: float = 0.8
    ramp: float = 0.5
    checkpoint_every: int = 16

    def __post_init__(self) -> None:
        if self.loss not in ("distil", "price"):
            raise ValueError(f"loss={self.loss!r} is unknown; take 'distil' or 'price'.")
        for name in ("shards", "epochs", "steps_ahead", "price", "batch", "checkpoint_every"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} is not above 0.")


@dataclass(frozen=True)
class Batch:
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

    @classmethod
    def of(
        cls,
        tokens: list[torch.Tensor],
        states: list[torch.Tensor],
        prompt_tokens: list[int],
        steps_ahead: int,
        device: str,
    ) -> "Batch":
        """Pads sequences into a batch."""
        ends = torch.tensor([len(ids) for ids in tokens])[:, None]
        starts = torch.tensor(prompt_tokens)[:, None]
        padded = functional.pad(pad_sequence(tokens, batch_first=True), (0, steps_ahead + 1))
        kept = pad_sequence(states, batch_first=True)
        # The last anchor is two tokens before the end: one is known, one is guessed.
        queries = int((ends - starts - 1).amax().clamp(min=1))
        anchors = starts - 1 + torch.arange(queries)
        valid = (ends - 2 - anchors).clamp(min=0)
        anchors = anchors.clamp(max=int(ends.amax()) - 1)
        return cls(padded.to(device), kept.to(device), anchors.to(device), valid.to(device))


class _Float32Muon(TorchFunctionMode):
    """Keeps torch's Muon from rounding gradients to bfloat16.

    Without AVX-512 BF16 a CPU multiplies bfloat16 matrices so slowly that the rounding would make a
    step of training take ten times as long.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.bfloat16:
            # Muon changes the result in place.
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class Trainer:
    """A run in a directory: head, optimisers, plan, checkpoints and log.

    Args:
        directory: of the checkpoint and the log.
        options: how to train.
        target: for its embedding and its distribution.
        head: as training starts it.
        shard_path: number of a shard to its file, which may not be there yet.
        shard_sequences: sequences in each shard.
    """

    def __init__(
        self,
        directory: Path,
        options: TrainOptions,
        target: Target,
        head: Eagle3Head,
        shard_path: Callable[[int], Path],
        shard_sequences: int,
    ) -> None:
        self.directory = directory
        self.options = options
        self.target = target
        self.head = head
        self.shard_path = shard_path
        self.shard_batches = math.ceil(shard_sequences / options.batch)
        self.total = round(options.epochs * options.shards * self.shard_batches)
        self.done = 0
        self.aux = [target.aux_layers.index(layer) for layer in head.config.aux_layers]
        self.last = target.aux_layers.index(target.config.num_hidden_layers)
        self.loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = (
            partial(price_loss, price=options.price)
            if options.loss == "price"
            else distillation_loss
        )
        self.draft_head = target.lm_head[head.draft_tokens]
        self.to_draft = torch.full((target.config.vocab_size,), -1, device=target.device)
        self.to_draft[head.draft_tokens] = torch.arange(
            len(head.draft_tokens), device=target.device
        )
        self.low_precision = target.dtype == torch.bfloat16
        self.optimizers = self._optimizers()
        directory.mkdir(parents=True, exist_ok=True)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        options = self.options
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in self.head.named_parameters():
            by_muon = parameter.dim() == 2 and not name.startswith("lm_head")
            (matrices if by_muon else others).append(parameter)
        decay = options.weight_decay
        rates = options.adam_learning_rate, options.learning_rate
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, rates[0], (0.9, 0.95), weight_decay=decay),
            torch.optim.Muon(matrices, rates[1], decay, adjust_lr_fn="match_rms_adamw"),
        ]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]
        return optimizers

    def resume(self) -> None:
        """Goes on at the checkpoint of the directory, if there is one.

        Raises:
            ValueError: it belongs to a run with other options.
        """
        path = self.directory / CHECKPOINT
        if not path.is_file():
            return
        saved = torch.load(path, weights_only=True, map_location=self.target.device)
        check_same(f"{path} is of a run", saved["identity"], self._identity())
        self.head.load_state_dict(saved["head"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.done = saved["done"]

    def save(self) -> None:
        """Writes the checkpoint, complete or not at all."""
        content = {
            "identity": self._identity(),
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "done": self.done,
        }
        with replacing(self.directory / CHECKPOINT) as unfinished:
            torch.save(content, unfinished)

    def _identity(self) -> dict[str, Any]:
        identity = asdict(self.options)
        # A run may be made longer or shorter, and saved more or less often.
        for name in ("shards", "epochs", "checkpoint_every", "cool_down", "ramp"):
            identity.pop(name)
        identity["draft_tokens"] = int(self.head.draft_tokens.sum())
        identity["fed_layers"] = list(self.head.config.aux_layers)
        return identity

    def run(
        self, until: int | None = None, report: Callable[[dict[str, Any]], None] = print
    ) -> None:
        """Trains to the end of the plan, or until a step, with a checkpoint there.

        Each step's figures are reported, and go into the log.
        """
        stop = self.total if until is None else min(until, self.total)
        batches = self._plan(self.done)
        with (self.directory / LOG).open("a", encoding="utf-8") as log:
            while self.done < stop:
                batch = next(batches)
                start = time.perf_counter()
                figures = self._step(batch)
                self.done += 1
                seconds = round(time.perf_counter() - start, 3)
                figures |= {"step": self.done, "total": self.total, "seconds": seconds}
                log.write(json.dumps(figures) + "\n")
                log.flush()
                report(figures)
                if self.done % self.options.checkpoint_every == 0 or self.done == stop:
                    self.save()

    def data_tokens(self) -> dict[str, int]:
        """Returns how many tokens the shards hold, of prompts and of answers."""
        numbers = range(self.options.shards)
        shards = [Shard(wait_for(self.shard_path(number))) for number in numbers]
        prompts = sum(sum(shard.prompt_tokens) for shard in shards)
        return {
            "prompt_tokens": prompts,
            "answer_tokens": sum(sum(shard.lengths) for shard in shards) - prompts,
        }

    def log_sum(self, name: str) -> float:
        """Returns the sum of a figure over the steps done."""
        return float(round(sum(line[name] for line in self._log()), 1))

    def log_means(self, count: int) -> dict[str, list[float]]:
        """Returns the mean loss and accuracy by drafting step, over the last `count` steps."""
        last = self._log()[-count:]
        wide = [line for line in last if len(line["loss"]) == len(last[-1]["loss"])]
        return {
            name: np.mean([line[name] for line in wide], 0).round(4).tolist()
            for name in ("loss", "accuracy")
        }

    def _log(self) -> list[dict[str, Any]]:
        """Returns the log, a step that was done again counted once."""
        lines = (self.directory / LOG).read_text(encoding="utf-8").splitlines()
        steps = {line["step"]: line for line in map(json.loads, lines)}
        return [steps[step] for step in sorted(steps) if step <= self.done]

    def _plan(self, first: int) -> Iterator[Batch]:
        """Yields the batches from the step `first` on."""
        options = self.options
        begin, skip = divmod(first, self.shard_batches)
        for number in range(begin, math.ceil(options.epochs) * options.shards):
            epoch, place = divmod(number, options.shards)
            order = list(range(options.shards))
            # The first pass takes the shards as they are made.
            if epoch:
                random.Random(f"{options.seed} {epoch}").shuffle(order)
            shard = Shard(wait_for(self.shard_path(order[place])))
            content: tuple[list[Any], ...] = (*shard.read(), shard.prompt_tokens)
            # Little padding where the lengths are alike.
            order = sorted(range(len(shard.lengths)), key=shard.lengths.__getitem__)
            size = options.batch
            groups = [order[start : start + size] for start in range(0, len(order), size)]
            random.Random(f"{options.seed} {epoch} {place}").shuffle(groups)
            for group in groups[skip:]:
                tokens, states, prompts = ([of[index] for index in group] for of in content)
                yield Batch.of(tokens, states, prompts, options.steps_ahead, self.target.device)
            skip = 0

    def _step(self, batch: Batch) -> dict[str, Any]:
        share = self.done / self.total
        factor = min(1.0, (self.done + 1) / self.options.warm_up)
        factor *= min(1.0, (1 - share) / self.options.cool_down)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.zero_grad()
        losses, correct, counts = self._losses(batch)
        weights = [self.options.step_decay**step / max(1, counts[0]) for step in range(len(losses))]
        loss = torch.stack(losses) @ torch.tensor(weights, device=self.target.device)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        with nullcontext() if self.low_precision else _Float32Muon():
            for optimizer in self.optimizers:
                optimizer.step()
        return {
            "loss": [
                round(float(one.detach()) / max(1, n), 4)
                for one, n in zip(losses, counts, strict=True)
            ],
            "accuracy": [round(c / max(1, n), 4) for c, n in zip(correct, counts, strict=True)],
            "tokens": counts[0],
        }

    def _losses(self, batch: Batch) -> tuple[list[torch.Tensor], list[int], list[int]]:
        """Returns per step: the summed loss, right guesses, guesses."""
        count = self._steps_ahead()
        device_type = torch.device(self.target.device).type
        losses, correct, counts = [], [], []
        embeddings = self.target.embedding[batch.tokens[:, 1:]]
        with torch.autocast(device_type, torch.bfloat16, enabled=self.low_precision):
            # The state one token before the guessed one gives the target's logits. Step j of an
            # anchor guesses what step 0 of the j-th anchor after it does.
            first = batch.valid > 0
            place = torch.full_like(batch.anchors, -1)
            place[first] = torch.arange(int(first.sum()), device=place.device)
            row, after = torch.nonzero(first)[:, 0], batch.anchors[first] + 1
            with torch.no_grad():
                last = self.target.normed(batch.states[row, after, self.last])
                wanted = functional.linear(last, self.draft_head).float()
                chosen = self.to_draft[batch.tokens[row, after + 1]]
            outputs = self.head.steps(
                batch.states[:, :, self.aux], embeddings, batch.anchors, count
            )
            for step, hidden in enumerate(outputs):
                rows = batch.valid > step
                index = place[:, step:][rows[:, : max(0, place.shape[1] - step)]]
                logits = self.head.lm_head(hidden[rows]).float()
                losses.append((self.loss(logits, wanted[index]) * (chosen[index] >= 0)).sum())
                correct.append(int((logits.detach().argmax(-1) == chosen[index]).sum()))
                counts.append(len(index))
        return losses, correct, counts

    def _steps_ahead(self) -> int:
        ramp = self.done < self.options.ramp * self.total
        return min(2, self.options.steps_ahead) if ramp else self.options.steps_ahead


def choose_draft_tokens(paths: list[Path], size: int, vocab_size: int) -> torch.Tensor:
    """Returns the `size` most frequent tokens of the answers, ascending.

    Where the answers hold fewer, the prompts' tokens and then the lowest ids fill up; a byte-pair
    vocabulary numbers frequent tokens low.
    """
    answers, others = (torch.zeros(vocab_size) for _ in range(2))
    for path in paths:
        shard = Shard(path)
        for ids, prompt_tokens in zip(shard.tokens(), shard.prompt_tokens, strict=True):
            answers += torch.bincount(ids[prompt_tokens:], minlength=vocab_size)
            others += torch.bincount(ids[:prompt_tokens], minlength=vocab_size)
    rank = answers * (others.sum() + 1) + others
    order = torch.sort(rank, descending=True, stable=True).indices
    return order[:size].sort().values
