"""Trees: hand-computed cases, properties, and every CPU form against the oracle's paths."""

import itertools
import math
import operator
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_calls import PRICE, TreeCall, tree_calls
from vllm_mars import verify_greedy, verify_tree
from vllm_mars.kernels import reference
from vllm_mars.kernels.terms import MOST_NODES

PREFERENCES = ("draft", "target", "longest")


def one_tree(rows, drafts, parents, **options):
    """A call of one request; row 0 is the root's and row i + 1 that of node i."""
    count = len(drafts)
    given = {"theta": [1.0], "gap": [0.0], "price": None, "draws": None}
    given |= {"protected": frozenset(), "prefer": "longest", **options}
    logits = torch.tensor(rows, dtype=torch.float32)
    return TreeCall(logits, drafts, parents, [count], [0], list(range(1, count + 1)), **given)


# Tokens 0 to 3. The root prefers 0, then 1 (1 nat less), then 2 (2 nats less).
ROOT = [5.0, 4.0, 3.0, -9.0]
SURE = [-9.0, -9.0, -9.0, 9.0]
# fmt: off
CASES = {
    # name: (rows, drafts, parents, options, path, loss in nats)
    "strict: the first choice":
        ([ROOT, SURE, SURE], [1, 0], [-1, -1], {}, [1], 0),
    "strict: nothing fits":
        ([ROOT, SURE, SURE], [1, 2], [-1, -1], {}, [], 0),
    "strict: down two levels":
        ([ROOT, SURE, SURE, SURE], [0, 3, 3], [-1, 0, 1], {}, [0, 1, 2], 0),
    "draft: its own order":
        ([ROOT, SURE, SURE], [1, 0], [-1, -1], {"gap": [2.0], "prefer": "draft"}, [0], 1),
    "target: the first choice":
        ([ROOT, SURE, SURE, SURE], [1, 0, 3], [-1, -1, 0],
         {"gap": [2.0], "prefer": "target"}, [1], 0),
    "target: without it the smallest loss":
        ([[5.0, 4.5, 4.5, 4.75], SURE, SURE, SURE], [1, 3, 2], [-1, -1, -1],
         {"price": [1.0], "prefer": "target"}, [1], 0.25),
    "longest: past the first choice":
        ([ROOT, SURE, SURE, SURE], [0, 1, 3], [-1, -1, 1],
         {"gap": [2.0]}, [1, 2], 1),
    "longest: of two the cheaper":
        ([ROOT, SURE, SURE], [1, 0], [-1, -1], {"gap": [2.0]}, [1], 0),
    "price: of any rank where it pays":
        ([ROOT, SURE, SURE, SURE], [2, 3, 3], [-1, 0, 1], {"price": [1.0]}, [0, 1, 2], 2),
    "price: too dear for what follows":
        ([ROOT, SURE, SURE], [2, 3], [-1, 0], {"price": [1.0]}, [], 0),
    "price: the branch that is worth more":
        ([ROOT, SURE, SURE, SURE], [0, 1, 3], [-1, -1, 1], {"price": [1.5]}, [1, 2], 1),
    "price: as much, the fewest relaxed":
        ([ROOT, SURE, SURE, SURE], [1, 3, 0], [-1, 0, -1], {"price": [1.0]}, [2], 0),
    "parents that cannot be":
        ([ROOT, SURE, SURE, SURE], [0, 0, 0], [0, 2, -2], {}, [], 0),
    "padding":
        ([ROOT, SURE, SURE], [-1, 4], [-1, -1], {"gap": [9.0]}, [], 0),
    "protected first choice":
        ([ROOT, SURE], [1], [-1], {"gap": [9.0], "protected": frozenset([0])}, [], 0),
    "a draw leads on":
        ([ROOT, SURE, SURE, SURE], [0, 2, 3], [-1, -1, 1], {"draws": [2, 0, 3, 1]}, [1, 2], 0),
    "a draw that nothing drafted":
        ([ROOT, SURE], [0], [-1], {"draws": [1, 0]}, [], 0),
    "outright, whatever is drawn":
        ([ROOT, SURE, SURE], [0, 1], [-1, -1],
         {"draws": [2, 3, 3], "gap": [2.0], "prefer": "draft"}, [0], 0),
    "outright, then a draw":
        ([ROOT, SURE, SURE, SURE], [1, 3, 3], [-1, 0, 1],
         {"draws": [2, 3, 0, 0], "gap": [2.0]}, [0, 1], 1),
    "sampled, each price alone":
        ([ROOT, SURE, SURE, SURE], [2, 3, 3], [-1, 0, 1],
         {"draws": [3, 3, 3, 3], "price": [1.5]}, [], 0),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_hand_computed(name):
    rows, drafts, parents, options, path, loss = CASES[name]
    call = one_tree(rows, drafts, parents, **options)
    output = call.run()
    assert [node for node in output.path[0].tolist() if node >= 0] == path
    assert float(output.loss) == loss
    end = path[-1] + 1 if path else 0
    last = call.draws[end] if call.draws else int(call.logits[end].argmax())
    tokens = [*(drafts[node] for node in path), last]
    assert [token for token in output.output_token_ids[0].tolist() if token >= 0] == tokens
    call.check(output)


@settings(max_examples=200, deadline=None)
@given(tree_calls())
def test_backends_equal_the_oracle(call):
    output = call.run()
    call.check(output)
    width = output.path.shape[1]
    # Wider than the deepest tree.
    for found in (call.run_on(reference, width), call.run(max_depth=width + 2)):
        call.check(found)


@settings(max_examples=120, deadline=None)
@given(tree_calls(chains=True, sampled=False))
def test_one_child_per_node_is_a_draft(call):
    """Bit for bit what `verify_greedy` gives, whatever is preferred."""
    logits, drafts, _, ends, root_rows, node_rows = call.tensors()
    # The row that judges a node, and the one behind a draft's last.
    behind, judging, at = [], [], 0
    for size, root_row in zip(call.sizes, call.root_rows, strict=True):
        rows = [root_row, *call.node_rows[at : at + size]]
        judging += rows[:-1]
        behind.append(rows[-1])
        at += size
    theta, gap, price = call.thresholds()
    expected = verify_greedy(
        *(logits, drafts, ends, None, theta),
        gap=gap,
        price=price,
        protected=call.options()["protected"],
        target_rows=torch.tensor(judging, dtype=call.id_dtype),
        bonus_rows=torch.tensor(behind, dtype=call.id_dtype),
    )
    output = call.run()
    for name in ("output_token_ids", "num_accepted", "num_relaxed", "lost"):
        assert torch.equal(getattr(output, name), getattr(expected, name)), name
    accepted = output.num_accepted.tolist()
    assert [[i for i in row if i >= 0] for row in output.path.tolist()] == [
        list(range(count)) for count in accepted
    ]


def strict_text(call, request):
    """What following first choices gives, or None where two children have one token."""
    start = sum(call.sizes[:request])
    row, node, text = call.root_rows[request], -1, []
    while True:
        text.append(int(call.logits[row].argmax()))
        hits = [
            i
            for i in range(node + 1, call.sizes[request])
            if (call.parents[start + i], call.drafts[start + i]) == (node, text[-1])
        ]
        if not hits:
            return text
        if len(hits) > 1:
            return None
        node = hits[0]
        row = call.node_rows[start + node]


@settings(max_examples=80, deadline=None)
@given(tree_calls(sampled=False))
def test_strict_is_a_strict_walk(call):
    """theta 1, gap 0 and price 0 follow the first choices, whatever is preferred."""
    count = len(call.sizes)
    call = replace(call, theta=[1.0] * count, gap=[0.0] * count, price=None)
    # As a tensor a price of 0 goes by the price's own rule.
    for output in (call.run(), call.run(price=torch.zeros(count))):
        for request in range(count):
            text = strict_text(call, request)
            if text is not None:
                emitted = output.output_token_ids[request].tolist()
                assert emitted == text + [-1] * (len(emitted) - len(text))
        assert not output.num_relaxed.any() and not output.lost.any()


@settings(max_examples=60, deadline=None)
@given(tree_calls(sampled=False), PRICE, PRICE)
def test_the_path_grows_with_the_price(call, one, other):
    low, high = sorted((one, other))
    call = replace(call, theta=[1.0] * len(call.sizes), gap=[0.0] * len(call.sizes), price=None)
    cheap, dear = call.run(price=low), call.run(price=high)
    assert (dear.num_accepted >= cheap.num_accepted).all()


@settings(max_examples=50, deadline=None)
@given(tree_calls(sampled=False), st.sampled_from([0.9, 0.5]), st.sampled_from([0.25, 0.0625]))
def test_the_longest_path_grows_as_theta_falls(call, high, low):
    call = replace(call, price=None, gap=[0.0] * len(call.sizes), prefer="longest")
    strict, tight, loose = (call.run(theta=theta) for theta in (1.0, high, low))
    assert (loose.num_accepted >= tight.num_accepted).all()
    assert (tight.num_accepted >= strict.num_accepted).all()


@settings(max_examples=50, deadline=None)
@given(tree_calls(), st.randoms(use_true_random=False))
def test_batch_order_does_not_matter(call, random):
    order = list(range(len(call.sizes)))
    random.shuffle(order)
    output, other = call.run(), call.with_batch_order(order).run()
    for found, wanted in zip(other, output, strict=True):
        assert torch.equal(found, wanted[order])


def distribution(call):
    """Probability of each emitted text: all draws of all rows, each as likely as its row says."""
    probabilities = call.logits.double().softmax(1).tolist()
    vocab = range(call.logits.shape[1])
    texts = Counter()
    for draws in itertools.product(vocab, repeat=len(probabilities)):
        output = replace(call, draws=list(draws)).run(max_depth=3)
        text = tuple(token for token in output.output_token_ids[0].tolist() if token >= 0)
        texts[text] += math.prod(map(operator.getitem, probabilities, draws))
    return texts


def target_of(call, text):
    """What the target gives to the tokens of a text, one after the other."""
    rows, node, probability = call.logits.double().softmax(1).tolist(), -1, 1.0
    for token in text:
        probability *= rows[node + 1][token]
        below = enumerate(zip(call.parents, call.drafts, strict=True))
        node = next((i for i, edge in below if edge == (node, token)), None)
    return probability


# Two children, one of them with two children; then a chain, and a tree with one likely child.
SHAPES = {
    "tree": ([0, 1, 2, 0], [-1, -1, 0, 0]),
    "chain": ([1, 0, 2, 2], [-1, 0, 1, 2]),
    "one level": ([2, 0, 1], [-1, -1, -1]),
    "twice the same": ([1, 1, 0], [-1, -1, 1]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prefer", PREFERENCES)
def test_strict_sampling_is_exact(shape, prefer):
    """Each text has the target's own probability, given that it is as long as it is."""
    drafts, parents = SHAPES[shape]
    torch.manual_seed(3)
    rows = torch.randn(len(drafts) + 1, 3).tolist()
    call = one_tree(rows, drafts, parents, prefer=prefer)
    texts = distribution(call)
    assert math.isclose(sum(texts.values()), 1)
    for text, probability in texts.items():
        assert math.isclose(probability, target_of(call, text)), text


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_a_strict_row_stays_exact_behind_a_relaxed_one(prefer):
    """Which of two relaxed children is taken does not depend on what is drawn below them."""
    small, wide = [2.0, 1.9, -3.0], [1.0, -2.0, 0.0]
    rows = [small, wide, [0.5, 3.0, -1.0], wide, wide]
    call = one_tree(rows, [0, 1, 2, 1], [-1, -1, 0, 1], gap=[0.2], prefer=prefer)
    behind = {0: Counter(), 1: Counter()}
    for text, probability in distribution(call).items():
        assert text[0] in behind, "one of the two largest is taken outright"
        behind[text[0]][text[1]] += probability
    taken = [token for token, found in behind.items() if found]
    assert len(taken) == 1
    row = call.logits[taken[0] + 1].double().softmax(0)
    for token, probability in behind[taken[0]].items():
        assert math.isclose(probability, float(row[token]))


def test_dividing_by_the_draft_is_not_exact():
    """What docs/rule.md says of a deterministic child with p = q = 0.5: the test is r <= p."""
    call = one_tree([[0.0, 0.0], [0.0, 0.0]], [0], [-1])
    accepted = sum(p for text, p in distribution(call).items() if len(text) == 2)
    assert math.isclose(accepted, 0.5)
    p = q = 0.5
    assert min(1.0, p / q) == 1.0


def test_no_more_nodes_than_the_limit_are_looked_at():
    """One node more than that, a chain of first choices: the last is as if it were not there."""
    count = MOST_NODES + 1
    rows = [[0.0, 1.0]] * (count + 1)
    call = one_tree(rows, [1] * count, list(range(-1, count - 1)))
    output = call.run()
    assert int(output.num_accepted) == MOST_NODES
    call.check(output)
    call.check(call.run_on(reference, count))


def test_nothing_is_drafted():
    output = verify_tree(
        torch.tensor([[0.0, 1.0], [2.0, 1.0]]),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor([1, 0]),
        torch.zeros(0, dtype=torch.int64),
        0.9,
    )
    assert output.output_token_ids.tolist() == [[0], [1]]
    assert output.path.shape == (2, 0)


def arguments(**changes):
    given = {
        "logits": torch.zeros(5, 4),
        "draft_token_ids": torch.tensor([1, 2, 3]),
        "parents": torch.tensor([-1, 0, -1], dtype=torch.int32),
        "cu_num_draft_tokens": torch.tensor([2, 3], dtype=torch.int32),
        "root_rows": torch.tensor([0, 1]),
        "node_rows": torch.tensor([2, 3, 4]),
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(5)}, "logits has 1 dimensions"),
        ({"parents": torch.tensor([-1, 0, -1])}, "parents has dtype torch.int64"),
        (
            {"parents": torch.tensor([-1, 0], dtype=torch.int32)},
            r"parents has shape \[2\], but must have shape \[3\]",
        ),
        ({"root_rows": torch.tensor([0])}, r"root_rows has shape \[1\], but must have shape \[2\]"),
        ({"node_rows": torch.zeros(3)}, "node_rows has dtype torch.float32"),
        ({"node_rows": torch.arange(6)[::2]}, r"node_rows has strides \[2\]"),
        ({"draws": torch.tensor([0, 1])}, r"draws has shape \[2\], but must have shape \[5\]"),
        ({"draws": torch.zeros(5)}, "draws has dtype torch.float32"),
        ({"prefer": "deepest"}, "prefer='deepest' is not one of 'draft', 'target', 'longest'"),
        ({"max_depth": -1}, "max_depth=-1 is below 0; give the depth of the deepest tree"),
        ({"theta": 1.5}, r"theta=1.5 is outside \(0, 1\]"),
        ({"gap": -1.0}, r"gap=-1.0 is outside \[0, inf\)"),
        ({"theta": 0.9, "price": 0.5}, "price=0.5 is given beside theta=0.9"),
        ({"protected": torch.zeros(3, dtype=torch.bool)}, r"protected has shape \[3\]"),
        ({"backend": "cuda"}, "backend='cuda' is not one of"),
    ],
)
def test_wrong_argument_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        verify_tree(**arguments(**changes))


def test_triton_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotImplementedError, match="backend='triton' needs logits"):
        verify_tree(**arguments(), backend="triton")
