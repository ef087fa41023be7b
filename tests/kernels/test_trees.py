"""Trees on a CPU: hand-computed cases, properties, and the definition."""

import pytest
import torch

from tree_calls import as_call, check, random_call
from vllm_mars import verify_greedy, verify_tree

# Tokens 0 to 3. The root prefers 0, then 1 (1 nat less), then 2 (2 nats less).
ROOT = [5.0, 4.0, 3.0, -9.0]
SURE = [-9.0, -9.0, -9.0, 9.0]
# fmt: off
CASES = {
    # name: (rows, drafts, parents, options, path, loss in nats); row 0 is the root's
    "theta: a small margin":
        ([ROOT, SURE, SURE], [1, 3], [-1, 0], {"theta": 0.75}, [0, 1], 1),
    "draft: its own order":
        ([ROOT, SURE, SURE], [1, 0], [-1, -1], {"theta": 0.75, "prefer": "draft"}, [0], 1),
    "target: the first choice":
        ([ROOT, SURE, SURE, SURE], [1, 0, 3], [-1, -1, 0],
         {"theta": 0.75, "prefer": "target"}, [1], 0),
    "target: without it the smallest loss":
        ([[5.0, 4.5, 4.5, 4.5], SURE, SURE, SURE], [3, 1, 2], [-1, -1, -1],
         {"theta": 0.75, "prefer": "target"}, [0], 0.5),
    "price: of any rank where it pays":
        ([ROOT, SURE, SURE, SURE], [2, 3, 3], [-1, 0, 1], {"price": 1.0}, [0, 1, 2], 2),
    "price: too dear for what follows":
        ([ROOT, SURE, SURE], [2, 3], [-1, 0], {"price": 1.0}, [], 0),
    "price: the branch that is worth more, whatever is preferred":
        ([ROOT, SURE, SURE, SURE], [0, 1, 3], [-1, -1, 1],
         {"price": 1.5, "prefer": "draft"}, [1, 2], 1),
    "price: as much, the fewest relaxed":
        ([ROOT, SURE, SURE, SURE], [1, 3, 0], [-1, 0, -1], {"price": 1.0}, [2], 0),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_hand_computed(name):
    rows, drafts, parents, options, path, loss = CASES[name]
    nodes = list(range(1, len(rows)))
    call = as_call(torch.tensor(rows), drafts, parents, [len(drafts)], [0], nodes, **options)
    output = verify_tree(**call)
    assert [node for node in output.path[0].tolist() if node >= 0] == path
    assert output.lost.tolist() == [loss * 2**16]
    last = int(call["logits"][path[-1] + 1 if path else 0].argmax())
    tokens = [*(drafts[node] for node in path), last]
    assert [token for token in output.output_token_ids[0].tolist() if token >= 0] == tokens


def test_equals_the_definition():
    accepted = relaxed = 0
    for seed in range(300):
        call = random_call(seed)
        output = verify_tree(**call)
        check(call, output)
        accepted += int(output.num_accepted.sum())
        relaxed += int(output.num_relaxed.sum())
    assert accepted > 300 and relaxed > 50


@pytest.mark.parametrize("rule", ["theta", "price"])
def test_one_child_per_node_is_a_draft(rule):
    """What `verify_greedy` gives, whatever is preferred."""
    for seed in range(60):
        call = random_call(seed, rule=rule)
        ends = call["cu_num_draft_tokens"].tolist()
        order, parents = [], []
        for start, end, root in zip([0, *ends], ends, call["root_rows"].tolist(), strict=False):
            order += [root, *call["node_rows"][start:end].tolist()]
            parents += range(-1, end - start - 1)
        output = verify_tree(**call | {"parents": torch.tensor(parents, dtype=torch.int32)})
        expected = verify_greedy(
            *(call["logits"][order], call["draft_token_ids"], call["cu_num_draft_tokens"]),
            **{rule: call[rule]},
            protected=call["protected"],
            max_draft_len=output.path.shape[1],
        )
        for name in ("output_token_ids", "num_accepted", "num_relaxed", "lost"):
            assert torch.equal(getattr(output, name), getattr(expected, name)), (seed, name)


@pytest.mark.parametrize("prefer", ["draft", "target", "longest"])
def test_theta_1_and_price_0_are_strict(prefer):
    for seed in range(40):
        call = random_call(seed, prefer=prefer, rule="theta")
        del call["theta"]
        for rule in ({"theta": 1.0}, {"price": 0.0}):
            output = verify_tree(**call, **rule)
            check(call | {name: torch.full((3,), value) for name, value in rule.items()}, output)
            assert not output.num_relaxed.any() and not output.lost.any()


def test_no_more_nodes_than_128_are_looked_at():
    """A chain of 129 first choices: the last is as if it were not there."""
    count = 129
    rows = torch.tensor([[0.0, 1.0]] * (count + 1))
    parents, nodes = list(range(-1, count - 1)), list(range(1, count + 1))
    output = verify_tree(**as_call(rows, [1] * count, parents, [count], [0], nodes, theta=1.0))
    assert output.num_accepted.tolist() == [128]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": torch.zeros(2).int()}, r"draft_token_ids has shape \[3\], but must have"),
        ({"prefer": "deepest"}, "prefer='deepest' is not one of 'draft', 'target', 'longest'"),
        ({"theta": 1.5}, r"theta=1.5 is outside \(0, 1\]"),
        ({"price": 0.5}, "Exactly one of theta and price names the rule; theta and price is"),
        ({"theta": None}, "names the rule; none of them is given"),
    ],
)
def test_wrong_argument_is_named(changes, message):
    call = as_call(torch.zeros(5, 4), [1, 2, 3], [-1, 0, -1], [2, 1], [0, 1], [2, 3, 4], theta=0.9)
    with pytest.raises(ValueError, match=message):
        verify_tree(**call | changes)
