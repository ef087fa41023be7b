"""Margin-aware verification in plain torch: the definition that every backend is checked against.

The rule (arXiv 2601.15498, Section 3), at one draft position with target logits z, draft token x,
z1 >= z2 the two largest logits counted with multiplicity:

    strict(x)   x = argmax z, of equal maxima the lowest id
    relaxed(x)  z[x] >= z2  and  z2 > theta * z1 - gap  and  (theta = 1 or z1 > 0)
                and neither x nor argmax z is protected
    accept(x)   strict(x) or relaxed(x)

What else forbids relaxed(x) at a position where the margin allows it is its `Verdict`: a protected
token, a caller's `blocked` position, or the `RelaxedBudget` or `LossBudget` of its request.

Where there is a price, the step's prefix decides instead. With r_i = max z_i - z_i[x_i], the loss
of draft token i (it is log p(first choice) - log p(x_i)), position i is payable where x_i is not
the argmax, its logit is finite, and nothing forbids it. Verification may stop at any s that is the
draft's length or not strict, if every i < s is strict or payable. It stops at the s that maximises

    price * s - sum of r_i over the payable i < s,

of several the smallest, and the payable i < s are the relaxed ones. Where a draw decides, each
position stands alone: relaxed is r_i < price, the argmax included.

All comparisons are in float32: first `theta * z1`, rounded, then `- gap`, rounded. A row that holds
a NaN is never relaxed: torch's topk carries the NaN into z1. A draft id outside [0, vocab) is
padding and never accepted. It runs on any device and reads the rows about four times.
"""

import torch

from vllm_mars.kernels.terms import (
    LOSS_BITS,
    MOST_LOSS,
    Drafts,
    Judgement,
    LossBudget,
    Margin,
    RelaxedBudget,
    Verdict,
    VerifyOutput,
    most_lost,
    most_relaxed,
    price_units,
)


def _target_rows(drafts: Drafts) -> torch.Tensor:
    """The rows of logits of the draft positions, `[num_draft, vocab]`."""
    if drafts.target_rows is None:
        return drafts.logits[: drafts.draft_token_ids.shape[0]]
    return drafts.logits[drafts.target_rows]


def _per_position(value: float | torch.Tensor, drafts: Drafts) -> torch.Tensor:
    """A float, or `[batch]` values repeated for each request's draft positions, as float32."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=torch.float32, device=drafts.logits.device)
    return value[drafts.locate()[0]]


def _price_units(price: float | torch.Tensor, drafts: Drafts) -> torch.Tensor:
    """A price, or that of each draft position's request, as int64."""
    units = price_units(price)
    if isinstance(units, int):
        return torch.tensor(units, device=drafts.logits.device)
    return _per_position(units, drafts)


def losses(drafts: Drafts) -> torch.Tensor:
    """What each draft token loses, as `Judgement` has it."""
    rows = _target_rows(drafts)
    in_vocab, ids = _in_vocabulary(drafts.draft_token_ids, rows.shape[1])
    loss = rows.float().amax(1) - rows.gather(1, ids[:, None]).squeeze(1).float()
    units = (loss * 2**LOSS_BITS).clamp(max=MOST_LOSS).ceil()
    return torch.where(in_vocab & ~loss.isnan(), units, 0).int()


def _verdicts(drafts: Drafts, margin: Margin, first_choice: bool) -> torch.Tensor:
    """The verdicts, int8 `[num_draft]`; with `first_choice` FIRST where the argmax is drafted.

    With `first_choice` and a price RELAXED stands at each payable position.
    """
    rows = _target_rows(drafts)
    in_vocab, ids = _in_vocabulary(drafts.draft_token_ids, rows.shape[1])
    argmax = rows.argmax(dim=-1)
    strict = in_vocab & (ids == argmax) & first_choice
    logit = rows.gather(1, ids[:, None]).squeeze(1).float()
    if margin.price is None:
        allowed = pays = in_vocab & ~strict & _is_small(rows, logit, drafts, margin)
    else:
        # A NaN is not below infinity.
        is_finite = (logit > -torch.inf) & (rows.float().amax(1) < torch.inf)
        allowed = in_vocab & ~strict & is_finite
        pays = allowed & (losses(drafts) < _price_units(margin.price, drafts))
        if not first_choice:
            allowed = pays
    forbidden = _forbidden(margin, ids, argmax)
    verdicts = (allowed & (forbidden == 0)).to(torch.int8) * Verdict.RELAXED
    verdicts = torch.where(pays & (forbidden != 0), forbidden, verdicts)
    verdicts = _within_budgets(verdicts, drafts, margin)
    verdicts[strict] = Verdict.FIRST
    return verdicts


def _is_small(
    rows: torch.Tensor, logit: torch.Tensor, drafts: Drafts, margin: Margin
) -> torch.Tensor:
    """Where the draft token is among the two largest and the margin between them is small."""
    if rows.shape[1] == 1:
        return torch.zeros_like(logit, dtype=torch.bool)
    theta, gap = _per_position(margin.theta, drafts), _per_position(margin.gap, drafts)
    # Values do not depend on how topk orders ties, so it may give them; ids it may not.
    first, second = rows.topk(2, dim=-1).values.float().unbind(-1)
    return (logit >= second) & (second > theta * first - gap) & ((theta == 1) | (first > 0))


def _forbidden(margin: Margin, ids: torch.Tensor, argmax: torch.Tensor) -> torch.Tensor:
    """The `Verdict` that forbids each position, whatever the margin says, or 0; int8."""
    forbidden = torch.zeros_like(ids, dtype=torch.int8)
    if margin.protected is not None:
        forbidden[margin.protected[ids] | margin.protected[argmax]] = Verdict.PROTECTED
    if margin.blocked is not None:
        forbidden = torch.where(margin.blocked != 0, margin.blocked, forbidden)
    return forbidden


def _up_to_best_stop(
    verdicts: torch.Tensor, loss: torch.Tensor, drafts: Drafts, price: float | torch.Tensor
) -> torch.Tensor:
    """The verdicts, NONE in place of RELAXED from each request's best stop on."""
    verdicts = verdicts.clone()
    prices = _price_units(price, drafts).expand(len(verdicts)).tolist()
    begin = 0
    for end in drafts.cu_num_draft_tokens.tolist():
        best, best_stop, value = -1, begin, 0
        for stop in range(begin, end + 1):
            if (stop == end or verdicts[stop] != Verdict.FIRST) and value > best:
                best, best_stop = value, stop
            if stop == end or verdicts[stop] not in (Verdict.FIRST, Verdict.RELAXED):
                break
            value += prices[stop]
            if verdicts[stop] == Verdict.RELAXED:
                value -= int(loss[stop])
        behind = verdicts[best_stop:end]
        behind[behind == Verdict.RELAXED] = Verdict.NONE
        begin = end
    return verdicts


def _within_budgets(verdicts: torch.Tensor, drafts: Drafts, margin: Margin) -> torch.Tensor:
    """The verdicts, with BUDGET or LOSS where a request has used up what it may relax or lose."""
    count, nats = margin.budget, margin.loss_budget
    if count is None and nats is None:
        return verdicts
    verdicts, loss = verdicts.clone(), losses(drafts).tolist()
    begin = 0
    for request, end in enumerate(drafts.cu_num_draft_tokens.tolist()):
        relaxed = lost = 0
        for position in range(begin, end):
            if verdicts[position] == Verdict.RELAXED:
                # Of the step, with this position.
                tokens = position - begin + 1
                if count is not None and relaxed >= _left_to_relax(count, request, tokens):
                    verdicts[position] = Verdict.BUDGET
                elif nats is not None and lost + loss[position] > _left_to_lose(
                    nats, request, tokens
                ):
                    verdicts[position] = Verdict.LOSS
                else:
                    relaxed += 1
                    lost += loss[position]
        begin = end
    return verdicts


def _left_to_relax(budget: RelaxedBudget, request: int, tokens: int) -> int:
    """How many of the first so many tokens of this step may be relaxed."""
    output_tokens = int(budget.num_output_tokens[request]) + tokens
    return most_relaxed(budget.share, output_tokens) - int(budget.num_relaxed[request])


def _left_to_lose(budget: LossBudget, request: int, tokens: int) -> int:
    """How much the first so many tokens of this step may lose, in units of 2**-LOSS_BITS nats."""
    rate = int(budget.rate[request]) if isinstance(budget.rate, torch.Tensor) else budget.rate
    output_tokens = int(budget.num_output_tokens[request]) + tokens
    return most_lost(rate, budget.burst, output_tokens) - int(budget.lost[request])


def _in_vocabulary(draft_token_ids: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which drafts are tokens at all, and int64 ids that are safe to index with."""
    in_vocab = (draft_token_ids >= 0) & (draft_token_ids < vocab)
    return in_vocab, torch.where(in_vocab, draft_token_ids, 0).long()


def top2(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-2 of each `[rows, vocab]` row: float32 values and int32 ids, both `[rows, 2]`.

    Of equal logits the lower ids come first, in order, which `torch.topk` leaves open. A row that
    holds a NaN gives NaN for both values, the first NaN's id and -1; a vocabulary of one token
    gives 0 and -1.
    """
    values = logits.float()
    first, first_id = values.max(dim=-1, keepdim=True)
    second, second_id = values.scatter(1, first_id, -torch.inf).max(dim=-1, keepdim=True)
    # A row whose every other logit is -inf: the masked maximum ties with the mask itself.
    second_id = torch.where((second_id == first_id) & (first_id == 0), 1, second_id)
    nan = first.isnan()
    second = torch.where(nan, torch.nan, second)
    second_id = torch.where(nan | (second_id >= logits.shape[1]), -1, second_id)
    return torch.cat([first, second], 1), torch.cat([first_id, second_id], 1).int()


def judge_positions(drafts: Drafts, margin: Margin, with_top2_values: bool = False) -> Judgement:
    """The torch form of `vllm_mars.verify.judge_drafts`."""
    values = top2(_target_rows(drafts))[0] if with_top2_values else None
    return Judgement(_verdicts(drafts, margin, first_choice=False), values, losses(drafts))


def verify_greedy(
    drafts: Drafts, margin: Margin, with_verdicts: bool = False, dry_run: bool = False
) -> VerifyOutput:
    """The torch form of `vllm_mars.verify_greedy`."""
    rows = _target_rows(drafts)
    verdicts = _verdicts(drafts, margin, first_choice=True)
    loss = losses(drafts)
    if margin.price is not None:
        verdicts = _up_to_best_stop(verdicts, loss, drafts, margin.price)
    relaxed = (verdicts == Verdict.RELAXED) & (not dry_run)
    is_accepted = (verdicts == Verdict.FIRST) | relaxed

    # Ragged to padded: position j of request i is draft token start[i] + j, if j < counts[i].
    ends = drafts.cu_num_draft_tokens.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    offsets = torch.arange(drafts.max_draft_len + 1, device=ends.device)
    is_draft = offsets < counts[:, None]
    index = torch.where(is_draft, (ends - counts)[:, None] + offsets, len(verdicts))

    def by_request(values: torch.Tensor) -> torch.Tensor:
        """`[batch, max_draft_len + 1]`, 0 behind each request's draft."""
        return torch.cat([values, values.new_zeros(1)])[index]

    kept = by_request(is_accepted).cumprod(1).bool()
    num_accepted = kept.sum(1)
    is_relaxed = kept & by_request(relaxed)
    output = torch.where(kept, by_request(drafts.draft_token_ids).int(), -1)
    is_corrected = is_draft & (offsets == num_accepted[:, None])
    output = torch.where(is_corrected, by_request(rows.argmax(dim=-1)).int(), output)

    bonus_token_ids = drafts.bonus_token_ids
    if drafts.bonus_rows is not None:
        bonus_token_ids = drafts.logits[drafts.bonus_rows].argmax(dim=-1)
    if bonus_token_ids is not None:
        is_bonus = (offsets == counts[:, None]) & (num_accepted == counts)[:, None]
        output = torch.where(is_bonus, bonus_token_ids.reshape(-1, 1).int(), output)

    return VerifyOutput(
        output,
        num_accepted.int(),
        is_relaxed.sum(1).int(),
        torch.where(is_relaxed, by_request(loss), 0).sum(1),
        top2(rows)[0] if with_verdicts else None,
        verdicts if with_verdicts else None,
        loss if with_verdicts else None,
    )
