"""Verification of trees: hand-computed cases, and random trees with all paths enumerated."""

import math

import numpy as np
import pytest
import torch

from vllm_mars import verify_greedy, verify_tree

NAN, INF = math.nan, math.inf
VALUES = {"theta": [1.0, 0.9, 0.5, 0.0625], "price": [0.0, 0.25, 1.0, 4.0]}
LOGITS = [0.0, -0.0, 1.0, 1.9, 2.0, 3.0, 10.0, -1.0, -INF]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tokens 0 to 3. The root's argmax is 0; token 1 loses 1 nat, token 2 loses 2.
ROOT = [5.0, 4.0, 3.0, -9.0]
SURE = [-9.0, -9.0, -9.0, 9.0]
# fmt: off
CASES = {
    # name: (rows, drafts, parents, options, path, loss in nats); row 0 is the root's
    "theta: small margin":
        ([ROOT, SURE, SURE], [1, 3], [-1, 0], {"theta": 0.75}, [0, 1], 1),
    "draft: order of the draft":
        ([ROOT, SURE, SURE], [1, 0], [-1, -1], {"theta": 0.75, "prefer": "draft"}, [0], 1),
    "target: the argmax":
        ([ROOT, SURE, SURE, SURE], [1, 0, 3], [-1, -1, 0],
         {"theta": 0.75, "prefer": "target"}, [1], 0),
    "target: otherwise the smallest loss":
        ([[5.0, 4.5, 4.5, 4.5], SURE, SURE, SURE], [3, 1, 2], [-1, -1, -1],
         {"theta": 0.75, "prefer": "target"}, [0], 0.5),
    "price: any rank within the price":
        ([ROOT, SURE, SURE, SURE], [2, 3, 3], [-1, 0, 1], {"price": 1.0}, [0, 1, 2], 2),
    "price: too expensive for what follows":
        ([ROOT, SURE, SURE], [2, 3], [-1, 0], {"price": 1.0}, [], 0),
    "price: the branch of higher value, for any preference":
        ([ROOT, SURE, SURE, SURE], [0, 1, 3], [-1, -1, 1],
         {"price": 1.5, "prefer": "draft"}, [1, 2], 1),
    "price: equal values, fewest relaxed":
        ([ROOT, SURE, SURE, SURE], [1, 3, 0], [-1, 0, -1], {"price": 1.0}, [2], 0),
}
# fmt: on


def as_call(logits, drafts, parents, sizes, root_rows, node_rows, **options):
    """Arguments of `verify_tree` as tensors; lists are by request, or by node over all requests."""
    return {
        "logits": logits,
        "draft_token_ids": torch.tensor(drafts, dtype=torch.int32),
        "parents": torch.tensor(parents, dtype=torch.int32),
        "cu_num_draft_tokens": torch.tensor(sizes).cumsum(0).int(),
        "root_rows": torch.tensor(root_rows),
        "node_rows": torch.tensor(node_rows, dtype=torch.int64),
        **options,
    }


def random_call(seed):
    """A ragged batch of trees with few distinct logits, so that ties are common."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 9, rng.integers(1, 4)).tolist()
    rows, vocab = sum(sizes) + len(sizes), int(rng.integers(2, 7))
    values = rng.choice(LOGITS + ([NAN, INF] if rng.random() < 0.3 else []), (rows, vocab))
    logits = np.where(rng.random((rows, vocab)) < 0.8, values, rng.normal(3, 2, (rows, vocab)))
    logits = torch.from_numpy(logits).to(DTYPES[rng.integers(3)])
    order = rng.permutation(rows).tolist()
    root_rows, node_rows = order[: len(sizes)], order[len(sizes) :]
    drafts, parents = [], []
    for root, size in zip(root_rows, sizes, strict=True):
        start = len(drafts)
        for node in range(size):
            # Mostly a recent parent and a likely token, so that paths get long.
            parent = max(-1, node - int(rng.geometric(0.5)))
            row = root if parent < 0 else node_rows[start + parent]
            likely = logits[row].float().nan_to_num(INF).topk(2).indices.tolist()
            draft = likely[min(int(rng.geometric(0.6)), 2) - 1]
            if rng.random() < 0.1:
                draft = int(rng.integers(-1, vocab + 1))
                parent = int(rng.choice([parent, node, node + 1, -2, 1000]))
            drafts.append(draft)
            parents.append(parent)
    rule = str(rng.choice(list(VALUES)))
    arguments = {
        rule: torch.tensor(rng.choice(VALUES[rule], len(sizes)), dtype=torch.float32),
        "prefer": str(rng.choice(["draft", "target", "longest"])),
        "protected": torch.from_numpy(rng.random(vocab) < 0.1) if rng.random() < 0.5 else None,
    }
    return as_call(logits, drafts, parents, sizes, root_rows, node_rows, **arguments)


def judged(call, request, rows, drafts):
    """Units that each draft token loses by `verify_greedy`: -1 for nothing, None if rejected."""
    # At the highest price every finite loss pays.
    rule = {"price": 8192} if "price" in call else {"theta": float(call["theta"][request])}
    logits = call["logits"][[row for row in rows for _ in range(2)]]
    ends = torch.arange(1, len(rows) + 1, dtype=torch.int32)
    output = verify_greedy(logits, drafts, ends, protected=call["protected"], **rule)
    columns = (output.num_accepted, output.num_relaxed, output.lost)
    results = zip(*(column.tolist() for column in columns), strict=True)
    return [(lost if relaxed else -1) if accepted else None for accepted, relaxed, lost in results]


def expected(call):
    """Path, number of relaxed nodes and units lost of each request."""
    start = 0
    for request, end in enumerate(call["cu_num_draft_tokens"].tolist()):
        parents = call["parents"][start:end].tolist()
        rows = [*call["node_rows"][start:end].tolist(), int(call["root_rows"][request])]
        above = [rows[parent] if -1 <= parent < node else -1 for node, parent in enumerate(parents)]
        loss = judged(call, request, above, call["draft_token_ids"][start:end])
        paths = {-1: []}
        for node, parent in enumerate(parents):
            if parent in paths and loss[node] is not None:
                paths[node] = [*paths[parent], node]
        price = float(call["price"][request]) if "price" in call else None
        path = preferred(list(paths.values()), loss, price, call["prefer"])
        paid = [loss[node] for node in path if loss[node] >= 0]
        yield path, len(paid), sum(paid)
        start = end


def preferred(paths, loss, price, prefer):
    """The best of all acceptable paths, including the empty one."""

    def rank(path):
        paid = [loss[node] for node in path if loss[node] >= 0]
        worth = (len(path), -sum(paid)) if price is None else price * 2**16 * len(path) - sum(paid)
        return worth, -len(paid), len(path), -max(path, default=-1)

    if price is not None or prefer == "longest":
        return max(paths, key=rank)
    path = []
    while nexts := [longer for longer in paths if longer and longer[:-1] == path]:
        path = min(nexts, key=lambda path: (loss[path[-1]] if prefer == "target" else 0, path[-1]))
    return path


def check(call, output):
    """Compares an output with the expected one exactly."""
    start = 0
    for request, (path, num_relaxed, lost) in enumerate(expected(call)):
        ids, rows = (call[name][start:] for name in ("draft_token_ids", "node_rows"))
        last = rows[path[-1]] if path else call["root_rows"][request]
        tokens = [*ids[path].tolist(), int(call["logits"][last].argmax())]
        padding = [-1] * (output.path.shape[1] - len(path))
        row = [tokens + padding, path + padding, len(path), num_relaxed, lost]
        assert [values[request].tolist() for values in output] == row
        start = int(call["cu_num_draft_tokens"][request])


@pytest.mark.parametrize("name", CASES)
def test_hand_computed_trees(name):
    rows, drafts, parents, options, path, loss = CASES[name]
    nodes = list(range(1, len(rows)))
    call = as_call(torch.tensor(rows), drafts, parents, [len(drafts)], [0], nodes, **options)
    output = verify_tree(**call)
    assert [node for node in output.path[0].tolist() if node >= 0] == path
    assert output.lost.tolist() == [loss * 2**16]
    last = int(call["logits"][path[-1] + 1 if path else 0].argmax())
    tokens = [*(drafts[node] for node in path), last]
    assert [token for token in output.output_token_ids[0].tolist() if token >= 0] == tokens


def test_the_best_path_is_accepted():
    accepted = relaxed = 0
    for seed in range(300):
        call = random_call(seed)
        output = verify_tree(**call)
        check(call, output)
        accepted += int(output.num_accepted.sum())
        relaxed += int(output.num_relaxed.sum())
    assert accepted > 300 and relaxed > 50


def test_at_most_128_nodes_are_verified():
    """A chain of 129 argmaxes."""
    count = 129
    rows = torch.tensor([[0.0, 1.0]] * (count + 1))
    parents, nodes = list(range(-1, count - 1)), list(range(1, count + 1))
    output = verify_tree(**as_call(rows, [1] * count, parents, [count], [0], nodes, theta=1.0))
    assert output.num_accepted.tolist() == [128]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": torch.zeros(2).int()}, r"draft_token_ids has shape \[3\], but must have"),
        ({"logits": torch.zeros(5, 4, 2)}, r"logits has shape \[0, 4, 2\], but must have"),
        ({"prefer": "deepest"}, "prefer='deepest' is not one of 'draft', 'target', 'longest'"),
        ({"theta": 1.5}, r"theta=1.5 is outside \(0, 1\]"),
        ({"price": 0.5}, "Exactly one of .* names the rule; theta=0.9 and price=0.5 is given"),
        ({"theta": None}, "Exactly one of theta and price .*; none of them is given"),
    ],
)
def test_errors_name_the_wrong_argument(changes, message):
    call = as_call(torch.zeros(5, 4), [1, 2, 3], [-1, 0, -1], [2, 1], [0, 1], [2, 3, 4], theta=0.9)
    with pytest.raises(ValueError, match=message):
        verify_tree(**call | changes)
