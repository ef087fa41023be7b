"""Random calls of `verify_tree`, and what the rule says of them: every path is looked at."""

import math

import numpy as np
import torch

NAN, INF = math.nan, math.inf
VALUES = {"theta": [1.0, 0.9, 0.5, 0.0625], "price": [0.0, 0.25, 1.0, 4.0]}
LOGITS = [0.0, -0.0, 1.0, 1.9, 2.0, 3.0, 10.0, -1.0, -INF]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_call(logits, drafts, parents, sizes, root_rows, node_rows, **options):
    """The arguments of `verify_tree` as tensors; lists are by request, or by node over all."""
    return {
        "logits": logits,
        "draft_token_ids": torch.tensor(drafts, dtype=torch.int32),
        "parents": torch.tensor(parents, dtype=torch.int32),
        "cu_num_draft_tokens": torch.tensor(sizes).cumsum(0).int(),
        "root_rows": torch.tensor(root_rows),
        "node_rows": torch.tensor(node_rows, dtype=torch.int64),
        **options,
    }


def random_call(seed, sizes=None, vocab=None, rule=None, **options):
    """A ragged batch of trees; what is not given is drawn.

    Where sizes are drawn, logits are of few values, so that ties are common, with infinities and
    NaN, and some nodes have no token or parent.
    """
    rng = np.random.default_rng(seed)
    is_small = sizes is None
    sizes = rng.integers(0, 9, rng.integers(1, 4)).tolist() if is_small else sizes
    rows = sum(sizes) + len(sizes)
    shape = rows, vocab or int(rng.integers(2, 7))
    logits = rng.normal(3, 2, shape).astype(np.float32)
    if is_small:
        few = LOGITS + ([NAN, INF] if rng.random() < 0.3 else [])
        logits = np.where(rng.random(shape) < 0.8, rng.choice(few, shape), logits)
    logits = torch.from_numpy(logits.astype(np.float32)).to(DTYPES[rng.integers(3)])
    order = rng.permutation(rows).tolist()
    root_rows, node_rows = order[: len(sizes)], order[len(sizes) :]
    drafts, parents = [], []
    for root, size in zip(root_rows, sizes, strict=True):
        start = len(drafts)
        for node in range(size):
            # Mostly a recent node, and a likely token, so that paths get long.
            parent = max(-1, node - int(rng.geometric(0.5)))
            row = root if parent < 0 else node_rows[start + parent]
            likely = logits[row].float().nan_to_num(INF).topk(min(3, shape[1])).indices.tolist()
            draft = likely[min(int(rng.geometric(0.6)), len(likely)) - 1]
            if is_small and rng.random() < 0.1:
                draft = int(rng.integers(-1, shape[1] + 1))
                parent = int(rng.choice([parent, node, node + 1, -2, 1000]))
            drafts.append(draft)
            parents.append(parent)
    rule = rule or str(rng.choice(list(VALUES)))
    protected = torch.from_numpy(rng.random(shape[1]) < 0.1) if rng.random() < 0.5 else None
    given = {
        rule: torch.tensor(rng.choice(VALUES[rule], len(sizes)), dtype=torch.float32),
        "prefer": str(rng.choice(["draft", "target", "longest"])),
        "protected": protected,
    }
    return as_call(logits, drafts, parents, sizes, root_rows, node_rows, **given | options)


STRICT = -1


def loss_of(row, draft, argmax, rule, value, protected):
    """What a token loses in steps of 2**-16 nats; STRICT, or None where it is not acceptable."""
    if draft == argmax:
        return STRICT
    if not 0 <= draft < len(row) or any(map(math.isnan, row)) or {draft, argmax} & protected:
        return None
    first, second = map(np.float32, sorted(row, reverse=True)[:2])
    if rule == "price":
        is_relaxed = row[draft] > -INF and first < INF
    else:
        with np.errstate(invalid="ignore"):
            is_small = second > value * first
        is_relaxed = row[draft] >= second and is_small and (value == 1 or first > 0)
    if not is_relaxed:
        return None
    return math.ceil(min(float(first - np.float32(row[draft])), 2.0**14) * 2**16)


def expected(call):
    """Tokens, path, number of relaxed nodes, and steps of 2**-16 nats lost, of each request."""
    (rule,) = {"theta", "price"} & call.keys()
    mask = call.get("protected")
    protected = set() if mask is None else set(mask.nonzero().flatten().tolist())
    start, found = 0, []
    for request, end in enumerate(call["cu_num_draft_tokens"].tolist()):
        rows = [*call["node_rows"][start:end].tolist(), int(call["root_rows"][request])]
        logits = [call["logits"][row].float().tolist() for row in rows]
        # Of equals the first, before which comes a NaN.
        argmax = [max(range(len(row)), key=lambda i: (row[i] != row[i], row[i])) for row in logits]
        drafts, parents = (call[n][start:end].tolist() for n in ("draft_token_ids", "parents"))
        value, paths, loss = call[rule].numpy()[request], {-1: []}, {}
        for node, parent in enumerate(parents[:128]):
            if -1 <= parent < node and parent in paths:
                judged = logits[parent], drafts[node], argmax[parent]
                loss[node] = loss_of(*judged, rule, value, protected)
                if loss[node] is not None:
                    paths[node] = [*paths[parent], node]
        path = preferred(list(paths.values()), loss, rule, value, call.get("prefer", "longest"))
        paid = [loss[node] for node in path if loss[node] != STRICT]
        tokens = [*(drafts[node] for node in path), argmax[path[-1] if path else -1]]
        found.append((tokens, path, len(paid), sum(paid)))
        start = end
    return found


def preferred(paths, loss, rule, value, prefer):
    """The path that is taken of all that are acceptable, the empty one too."""

    def rank(path):
        paid = [loss[node] for node in path if loss[node] != STRICT]
        price = math.floor(min(float(value), 2.0**13) * 2**16)
        worth = len(path) * price - sum(paid) if rule == "price" else (len(path), -sum(paid))
        return worth, -len(paid), len(path), -max(path, default=-1)

    if rule == "price" or prefer == "longest":
        return max(paths, key=rank)
    path = []
    while nexts := [longer for longer in paths if longer and longer[:-1] == path]:
        path = min(nexts, key=lambda path: (loss[path[-1]] if prefer == "target" else 0, path[-1]))
    return path


def check(call, output):
    """Compares an output with what the rule says, to the last bit."""
    for request, (tokens, path, num_relaxed, lost) in enumerate(expected(call)):
        found = [values[request].tolist() for values in output]
        width = len(found[1])
        wanted = tokens + [-1] * (width + 1 - len(tokens)), path + [-1] * (width - len(path))
        assert found == [*wanted, len(path), num_relaxed, lost]
