"""Distils a target into an EAGLE-3 head: training-time test on the target's own answers.

Each batch drafts from every token of the answers at once, some steps ahead. With p the target's
distribution over the draft vocabulary, q the head's, and a = sum min(p, q), the share of drafts
that strict verification accepts, a guess's loss is first the cross-entropy of q with p, then

    lam * cross-entropy - (1 - lam) * log a,    lam = exp(-3 * mean of a)    (arXiv 2602.23881)

Nothing is learned where the token of the text is no draft token.
"""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from benchmarks.draft.data import Conversation
from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.recipe import Recipe
from benchmarks.draft.target import Target

LAM_DECAY = 3.0


class Batch(NamedTuple):
    """Conversations of similar length, padded at the end: two tensors of [batch, length]."""

    tokens: torch.Tensor
    # Which of them are the answers'.
    answered: torch.Tensor


def make_batches(conversations: list[Conversation], recipe: Recipe) -> list[Batch]:
    """Returns batches of at most `batch_tokens`, with padding, in random order."""
    groups: list[list[Conversation]] = []
    for one in sorted(conversations, key=lambda pair: len(pair[0]) + len(pair[1])):
        if not groups or (len(groups[-1]) + 1) * sum(map(len, one)) > recipe.batch_tokens:
            groups.append([])
        groups[-1].append(one)
    random.Random(recipe.seed).shuffle(groups)
    found = []
    for group in groups:
        tokens = [torch.tensor(prompt + answer) for prompt, answer in group]
        answered = [torch.arange(len(prompt + answer)) >= len(prompt) for prompt, answer in group]
        found.append(Batch(pad_sequence(tokens, True), pad_sequence(answered, True)))
    return found


def train(
    head: Eagle3Head, target: Target, batches: list[Batch], recipe: Recipe
) -> Iterator[dict[str, Any]]:
    """Trains a head to the end of the recipe.

    Yields:
        After each step: loss and acceptance by drafting step, and how many tokens were guessed.
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
    total = recipe.epochs * len(batches)
    for done in range(total):
        factor = min(1.0, (done + 1) / recipe.warm_up, (1 - done / total) / recipe.cool_down)
        for optimizer, peak in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.zero_grad()
        starts = done < recipe.ramp * total
        ahead = min(2, recipe.steps_ahead) if starts else recipe.steps_ahead
        batch = batches[done % len(batches)]
        losses, accepted, guesses = batch_losses(head, target, batch, ahead, not starts)
        weights = recipe.step_decay ** torch.arange(ahead, device=target.device)
        torch.autograd.backward(losses @ weights)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        yield {"loss": losses.tolist(), "accepted": accepted.tolist(), "tokens": guesses}


def batch_losses(
    head: Eagle3Head, target: Target, batch: Batch, ahead: int, by_acceptance: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns loss and acceptance by drafting step, [ahead], and how many guesses the first has.

    Acceptance is a mean over the guesses of its step; a loss is their sum by the first's guesses.
    """
    length = batch.tokens.shape[1]
    tokens, answered = (functional.pad(part.to(target.device), (0, ahead + 1)) for part in batch)
    following = tokens[:, 1:]
    # Tokens of an answer before a draft token of it: what the target makes of them is what step j
    # wants of the anchor j + 1 tokens before.
    wanted = answered[:, :-1] & answered[:, 1:] & torch.isin(following, head.draft_tokens)
    place = wanted.flatten().cumsum(0).view_as(wanted) - 1
    losses, acceptance = [], []
    with target.autocast():
        states = target.states(tokens[:, :length])
        last = states[:, :, -1][wanted[:, :length]]
        probabilities = target.probabilities(last, head.draft_tokens)
        for step, hidden in enumerate(head.steps(states, target.embedding[following], ahead)):
            guessed = slice(step + 1, step + 1 + length)
            # The first anchor is the prompt's last token.
            rows = answered[:, 1 : length + 1] & wanted[:, guessed]
            p = probabilities[place[:, guessed][rows]]
            log_q = head.lm_head(hidden[rows]).float().log_softmax(-1)
            accepted = torch.minimum(p, log_q.exp()).sum(-1)
            acceptance.append(accepted.detach().sum() / max(1, len(p)))
            loss = -(p * log_q).sum(-1)
            if by_acceptance:
                lam = torch.exp(-LAM_DECAY * acceptance[-1])
                loss = lam * loss - (1 - lam) * accepted.log()
            losses.append(loss.sum() / max(1, len(last)))
    return torch.stack(losses), torch.stack(acceptance), len(last)


def choose_draft_tokens(batches: list[Batch], size: int, vocab_size: int) -> torch.Tensor:
    """Returns the `size` most frequent tokens of the answers, ascending.

    Where the answers hold fewer, the lowest ids fill up: a byte-pair vocabulary numbers frequent
    tokens low.
    """
    answers = torch.cat([batch.tokens[batch.answered] for batch in batches])
    counts = torch.bincount(answers, minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
