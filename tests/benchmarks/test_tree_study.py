"""The offline study of trees, on a tiny target: what it reads, drafts, accepts and sums up."""

import pytest
import torch
from transformers import LlamaForCausalLM

import tiny_models
from benchmarks.draft.export import export
from benchmarks.draft.head import new_head
from benchmarks.draft.target import Target
from benchmarks.tree_cells import STRICT, DraftShape, Rule, Study, rank_of
from benchmarks.tree_models import lineage
from benchmarks.tree_summary import summary
from vllm_mars.kernels.terms import LOSS_BITS

AUX = (0, 1, 2)
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]
SHAPES = [
    DraftShape("chain", 3),
    DraftShape("tree", 4),
    pytest.param(DraftShape("tree", 30), marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    tiny_models.llama(directory)
    tiny_models.tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def study(model, tmp_path_factory):
    target = Target(model, AUX, dtype=torch.float32)
    head = new_head(target, torch.arange(0, tiny_models.VOCAB, 2))
    directory = tmp_path_factory.mktemp("head")
    export(head, directory, target_name="tiny", target_sha256="", num_speculative_tokens=3)
    return Study(model, directory, PROMPTS, max_tokens=12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strict_answers_are_the_targets_own(study, model, shape):
    target = Target(model, AUX, dtype=torch.float32)
    own = {
        answer.index: answer.tokens[answer.prompt_tokens :].tolist()
        for answer in target.answer(PROMPTS, [0.0] * 3, 12, torch.Generator())
    }
    for row, answer in enumerate(study.answer(STRICT, shape)):
        assert answer.tokens[: len(own[row])] == own[row]
        assert answer.lost == answer.relaxed == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "rule", [Rule("price", 8.0), Rule("theta", 0.1), Rule("gap", 8.0)], ids=str
)
def test_what_is_lost_is_what_the_target_says_of_the_answer(study, model, rule, shape):
    """Each node was read behind its own path: one pass over the whole text gives the same."""
    answers = study.answer(rule, shape)
    target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert study.target.eos not in answer.tokens, "what follows an end would count as lost"
        text = torch.tensor([prompt + answer.tokens])
        with torch.inference_mode():
            logits = target(text).logits[0]
        # The first token is the prompt's, of no step.
        rows = torch.arange(len(prompt), text.shape[1] - 1)
        lost = logits[rows].amax(-1) - logits[rows, text[0, rows + 1]]
        assert answer.lost / 2**LOSS_BITS == pytest.approx(float(lost.sum()), abs=1e-3)
        assert answer.relaxed == (lost > 1e-6).sum()
    if rule.metric == "price":
        assert sum(answer.relaxed for answer in answers)


@pytest.mark.parametrize("metric", ["strict", "price"])
def test_sampled_answers_are_scored_as_the_target_scores_them(study, model, metric):
    torch.manual_seed(0)
    answers = study.answer(Rule(metric, 8.0, temperature=0.7), SHAPES[0])
    target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = torch.tensor([prompt + answer.tokens])
        with torch.inference_mode():
            scores = (target(text).logits[0] / 0.7).log_softmax(-1)
        # The first token is the prompt's, of no step.
        rows = torch.arange(len(prompt), text.shape[1] - 1)
        expected = -scores[rows, text[0, rows + 1]].sum()
        assert answer.nll == pytest.approx(float(expected), abs=1e-3)
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)
    assert sum(answer.relaxed for answer in answers) > 0 or metric == "strict"


def test_a_chain_is_what_the_head_guesses(study):
    """Against the steps of training, which recompute everything."""
    head, row, depth = study.head, 0, 4
    study.rewind()
    last = study.firsts[row]
    chain = study.draft([row], [last], DraftShape("chain", depth))
    _, states = study.target.fill(row, PROMPTS[row])
    tokens = [*PROMPTS[row][1:], last, *chain.tokens[0].tolist()]
    embeddings = study.target.embedding[tokens][None]
    anchors = torch.tensor([[len(states) - 1]])
    with torch.inference_mode():
        hidden = head.steps(states[None], embeddings, anchors, depth)
        guesses = [int(head.draft_tokens[head.lm_head(h[0, 0]).argmax()]) for h in hidden]
    assert chain.tokens[0].tolist() == guesses
    assert chain.parents[0].tolist() == [-1, 0, 1, 2]


def test_a_tree_holds_the_most_probable_paths(study):
    """All nodes are there, and a small tree is the beginning of a large one."""
    study.rewind()
    given = torch.tensor([1]), study.lengths[[1]], torch.tensor([study.firsts[1]])
    tree = study.head.draft(*given, 3, 2, 100)
    assert tree.tokens.shape == (1, 3 + 9)
    depths = lineage(tree.parents)[0, 1:].sum(1) - 1
    assert depths.tolist() == [1 if parent < 0 else 2 for parent in tree.parents[0]]
    small = study.head.draft(*given, 3, 2, 5)
    assert torch.equal(small.tokens, tree.tokens[:, :5])
    assert torch.equal(small.parents, tree.parents[:, :5])
    assert all(parent < node for node, parent in enumerate(tree.parents[0]))


def test_the_rank_of_a_token():
    logits, drafted = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([3, 8, 9])
    assert [rank_of(token, logits, drafted) for token in (8, 9, 3, 4, 10)] == [1, 2, 3, 0, 0]


LINE = {
    **dict.fromkeys(("schema", "created", "command", "versions", "git_commit"), ""),
    **dict.fromkeys(("hardware", "config", "seconds"), ""),
    **{"threads": 1, "rule": "strict", "shape": "chain 4", "nodes": 4, "relaxed": [1, 0]},
    **{"repeated": [0, 4], "lost": [1 << 15, 0], "ranks": [0, 2, 2, 9]},
    **{"tokens": [10, 10], "steps": [4, 6]},
}


def test_figures_by_hand():
    result = summary([LINE, {**LINE, "shape": "tree 4", "tokens": [15, 15]}], None)
    chain = result["cells"][0]
    assert chain["rows"] == 5
    assert chain["length"] == {"value": 2.0, "low": pytest.approx(10 / 6, abs=1e-4), "high": 2.5}
    assert chain["length_per_row"]["value"] == 0.4
    assert chain["nats_per_token"]["value"] == 0.025
    assert chain["repeated_4grams"]["value"] == 0.25
    assert chain["ranks"]["not drafted"] == 1 and chain["ranks"]["2"] == 2
    (ratio,) = result["trees_over_chains"]
    assert ratio["length_ratio"] == {"value": 1.5, "low": 1.5, "high": 1.5}


def test_trees_and_chains_at_equal_loss():
    def cell(rule, shape, length, loss):
        return {
            **{**LINE, "rule": rule, "shape": shape, "steps": [10, 10]},
            **{"tokens": [10 * length] * 2, "lost": [round(loss * 10 * length * 2**16)] * 2},
        }

    lines = [
        *(cell("strict", "chain 4", 2, 0.0), cell("strict", "tree 4", 3, 0.0)),
        *(cell("price 1", "chain 4", 4, 0.06), cell("price 1", "tree 4", 5, 0.03)),
        cell("theta 0.9", "chain 4", 9, 0.01),
    ]
    # The tree's largest price loses 0.03, so there is nothing to compare at 0.06.
    low, high = summary(lines, None)["by_price_at_equal_loss"]
    assert (low["nats_per_token"], high["nats_per_token"]) == (0.01, 0.03)
    assert low["chain_length"]["value"] == pytest.approx(2 + 1 / 3, abs=1e-4)
    assert low["tree_length"]["value"] == pytest.approx(3 + 2 / 3, abs=1e-4)
    assert high["chain_length"]["value"] == pytest.approx(3, abs=1e-4)
    assert high["length_ratio"]["high"] == pytest.approx(5 / 3, abs=1e-4)
