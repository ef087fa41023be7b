"""Random calls of `verify_tree`, and what the oracle says of them."""

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

import oracle
from vllm_mars import verify_tree
from vllm_mars.kernels.terms import Drafts, Margin, TreeOutput, Trees
from vllm_mars.verify import price_or_none

NAN, INF = math.nan, math.inf
PRICE = st.sampled_from([0.0, 0.25, 1.0, 4.0]) | st.floats(0, 8, width=32)


@dataclass
class TreeCall:
    """One call; lists are by request, or by node over all requests."""

    logits: torch.Tensor
    drafts: list[int]
    parents: list[int]
    sizes: list[int]
    root_rows: list[int]
    node_rows: list[int]
    theta: list[float]
    gap: list[float]
    price: list[float] | None
    protected: frozenset[int]
    prefer: str
    draws: list[int] | None
    id_dtype: torch.dtype = torch.int32

    def tensors(self):
        """The positional arguments up to theta."""
        return (
            self.logits,
            torch.tensor(self.drafts, dtype=self.id_dtype),
            torch.tensor(self.parents, dtype=torch.int32),
            torch.tensor(self.sizes).cumsum(0).int(),
            torch.tensor(self.root_rows, dtype=self.id_dtype),
            torch.tensor(self.node_rows, dtype=self.id_dtype),
        )

    def thresholds(self):
        """Theta, gap and price: one number where all requests have the same, else a tensor."""
        return tuple(
            values[0] if len(set(values)) == 1 else torch.tensor(values)
            for values in (self.theta, self.gap, self.price or [0.0] * len(self.sizes))
        )

    def options(self):
        mask = None
        if self.protected:
            mask = torch.zeros(self.logits.shape[1], dtype=torch.bool)
            mask[list(self.protected)] = True
        draws = None if self.draws is None else torch.tensor(self.draws, dtype=self.id_dtype)
        return {"protected": mask, "prefer": self.prefer, "draws": draws}

    def run(self, backend="torch", **changes) -> TreeOutput:
        """Calls the public function."""
        theta, gap, price = self.thresholds()
        given = {"theta": theta, "gap": gap, "price": price, **self.options(), **changes}
        return verify_tree(*self.tensors(), backend=backend, **given)

    def run_on(self, kernels, max_depth) -> TreeOutput:
        """Calls a module of kernels."""
        logits, drafts, parents, ends, root_rows, node_rows = self.tensors()
        theta, gap, price = self.thresholds()
        options = self.options()
        step = Drafts(
            *(logits, drafts, ends, node_rows),
            bonus_rows=root_rows,
            max_draft_len=max_depth,
        )
        margin = Margin(theta, gap, options["protected"], price=price_or_none(price))
        prefer = self.prefer if margin.price is None else "longest"
        return kernels.verify_tree(Trees(step, parents, prefer, options["draws"]), margin)

    def expected(self) -> list[oracle.Walked]:
        """What the oracle says of each request."""
        rows = self.logits.float().tolist()
        found, start = [], 0
        for request, size in enumerate(self.sizes):
            nodes = slice(start, start + size)
            own = [self.root_rows[request], *self.node_rows[nodes]]
            # A float price of 0 leaves the rule to theta and gap, which are strict beside it.
            tree = oracle.Tree(
                rows[own[0]],
                [rows[row] for row in own[1:]],
                self.drafts[nodes],
                self.parents[nodes],
                self.theta[request],
                self.gap[request],
                None if self.price is None else self.price[request],
                self.protected,
                self.prefer,
            )
            draws = None if self.draws is None else [self.draws[row] for row in own]
            found.append(oracle.verify_tree(tree, draws))
            start += size
        return found

    def check(self, output: TreeOutput) -> None:
        """Compares with the oracle, to the last bit."""
        tokens, path = output.output_token_ids.tolist(), output.path.tolist()
        for request, walked in enumerate(self.expected()):
            width = len(path[request])
            assert path[request] == walked.path + [-1] * (width - len(walked.path))
            assert tokens[request] == walked.tokens + [-1] * (width + 1 - len(walked.tokens))
            assert int(output.num_accepted[request]) == len(walked.path)
            assert int(output.num_relaxed[request]) == walked.relaxed
            assert int(output.lost[request]) == walked.loss * 2**16

    def with_batch_order(self, order: list[int]) -> "TreeCall":
        """The same with its requests in another order."""
        starts = [sum(self.sizes[:request]) for request in range(len(self.sizes))]

        def nodes(values):
            return [v for i in order for v in values[starts[i] : starts[i] + self.sizes[i]]]

        def requests(values):
            return None if values is None else [values[i] for i in order]

        return replace(
            self,
            **{name: nodes(getattr(self, name)) for name in ("drafts", "parents", "node_rows")},
            **{
                name: requests(getattr(self, name))
                for name in ("sizes", "root_rows", "theta", "gap", "price")
            },
        )


@st.composite
def tree_calls(draw, chains=False, specials=True, sampled=None):
    """A ragged batch of trees over few distinct logits, so that ties and small margins are common.

    Args:
        chains: whether each node has one child.
        specials: whether there are NaN and infinities, tokens that are none and parents that
            cannot be.
        sampled: whether there are draws; either by default.
    """
    vocab = draw(st.integers(2, 6))
    sizes = draw(st.lists(st.integers(0, 8), min_size=1, max_size=3))
    total = sum(sizes)
    logit = st.sampled_from([0.0, -0.0, 1.0, 1.9, 2.0, 3.0, 10.0, -1.0, -INF])
    logit = logit | st.floats(-4, 12, width=16)
    if specials and draw(st.booleans()):
        logit = logit | st.sampled_from([NAN, INF])
    num_rows = total + len(sizes) + 1
    rows = [draw(st.lists(logit, min_size=vocab, max_size=vocab)) for _ in range(num_rows)]
    order = draw(st.permutations(range(num_rows)))
    root_rows, node_rows = order[: len(sizes)], order[len(sizes) : len(sizes) + total]
    drafts, parents = [], []
    for request, size in enumerate(sizes):
        start = len(drafts)
        for node in range(size):
            parent = node - 1 if chains else draw(st.integers(-1, node - 1))
            row = rows[root_rows[request] if parent < 0 else node_rows[start + parent]]
            token = draw(st.integers(-1 if specials else 0, vocab - 1))
            # Towards the first choice, so that paths get long.
            drafts.append(oracle.argmax(row) if draw(st.booleans()) else token)
            if specials and not chains and draw(st.integers(0, 19)) == 0:
                parent = draw(st.sampled_from([node, node + 1, -2, 1000]))
            parents.append(parent)
    count = len(sizes)
    theta, gap, price = st.sampled_from([1.0, 0.9, 0.5, 0.0625]), st.sampled_from([0.0, 0.25]), None
    if draw(st.booleans()):
        theta, gap = st.just(1.0), st.just(0.0)
        price = draw(st.lists(PRICE, min_size=count, max_size=count))
        # One price of 0 for all is the rule by position.
        price = None if not any(price) else price
    if draw(st.booleans()) if sampled is None else sampled:
        draws = draw(st.lists(st.integers(0, vocab - 1), min_size=num_rows, max_size=num_rows))
    else:
        draws = None
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    return TreeCall(
        torch.tensor(rows, dtype=draw(st.sampled_from(dtypes))),
        *(drafts, parents, sizes, list(root_rows), list(node_rows)),
        draw(st.lists(theta, min_size=count, max_size=count)),
        draw(st.lists(gap, min_size=count, max_size=count)),
        price,
        draw(st.frozensets(st.integers(0, vocab - 1), max_size=2)),
        draw(st.sampled_from(["draft", "target", "longest"])),
        draws,
        draw(st.sampled_from([torch.int32, torch.int64])),
    )
