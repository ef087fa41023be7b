"""Tests cells, servers and turns of a sweep, and its refusals before anything starts."""

import json

import pytest

from sweep_files import write_prompts
from vllm_mars.lab.plan import AUTOREGRESSIVE, SweepOptions, load_sweep
from vllm_mars.models.drafts import NGRAM_CONFIG, RECOMMENDED

K4 = {**NGRAM_CONFIG, "num_speculative_tokens": 4}
MARS = {**K4, "rejection_sample_method": "mars"}


def configs(**options):
    """Speculative configs by name of the cell, at one temperature and concurrency."""
    return {cell.name: cell.config for cell in SweepOptions(**options).all_cells()}


def test_names_and_configs_of_rules():
    assert configs() == {"standard": K4, "mars": K4 | RECOMMENDED}
    assert configs(values={"price": (0.3,)}) == {
        "standard": K4,
        "price 0.3": MARS | {"mars_price": 0.3},
    }
    assert configs(
        methods=("autoregressive", "strict", "block"),
        values={"theta": (0.9,), "price": (1.0,)},
        cells=(
            'bounded={"mars_price": 0.3, "mars_max_loss": 0.02}',
            'drawn = {"draft_sample_method": "probabilistic"}',
            'suffix={"draft": "suffix", "num_speculative_tokens": 8}',
        ),
    ) == {
        "autoregressive": None,
        "strict": MARS | {"mars_price": 0.0},
        "block": K4 | {"rejection_sample_method": "block"},
        "theta 0.9": MARS | {"mars_theta": 0.9},
        "price 1": MARS | {"mars_price": 1.0},
        "bounded": MARS | {"mars_price": 0.3, "mars_max_loss": 0.02},
        "drawn": K4 | {"draft_sample_method": "probabilistic"},
        "suffix": {
            "method": "suffix",
            "suffix_decoding_max_cached_requests": 0,
            "num_speculative_tokens": 8,
        },
    }


def test_each_rule_is_measured_with_each_draft_and_length():
    by_name = configs(
        methods=("autoregressive", "standard"),
        cells=('long={"num_speculative_tokens": 9}',),
        drafts=("ngram", "org/head"),
        num_speculative_tokens=(3, 5),
    )
    assert list(by_name) == [
        "autoregressive",
        "standard, ngram, K 3",
        "standard, ngram, K 5",
        "standard, head, K 3",
        "standard, head, K 5",
        "long, ngram",
        "long, head",
    ]
    assert by_name["long, head"] == {"model": "org/head", "num_speculative_tokens": 9}


def test_a_cell_may_set_the_temperature():
    options = SweepOptions(
        methods=(),
        cells=('s={"temperature": 0}', 's={"mars_price": 0, "temperature": 1}', "plain=null"),
        temperatures=(0.5,),
        concurrencies=(1, 2),
    )
    cells = [(cell.name, cell.temperature, cell.concurrency) for cell in options.all_cells()]
    assert cells == [
        ("s", 0.0, 1),
        ("s", 0.0, 2),
        ("s", 1.0, 1),
        ("s", 1.0, 2),
        ("plain", 0.5, 1),
        ("plain", 0.5, 2),
    ]


def test_rules_that_differ_only_in_a_value_share_a_server():
    options = SweepOptions(
        values={"price": (0.3, 0.5), "theta": (0.9,)},
        cells=(
            'bounded={"mars_price": 0.3, "mars_max_loss": 0.02}',
            'limited={"mars_price": 0.4, "mars_max_loss": 0, "mars_limit": 1}',
        ),
    )
    ((servers, turns),) = load_sweep(options).groups(0)
    shared = MARS | {"mars_price": 0.5}
    assert {turn.cell.name: (json.loads(turn.server), turn.body) for turn in turns} == {
        "standard": (K4, {}),
        "price 0.3": (shared, {"vllm_xargs": {"mars_price": 0.3}}),
        "price 0.5": (shared, {"vllm_xargs": {"mars_price": 0.5}}),
        "theta 0.9": (MARS | {"mars_theta": 0.9}, {}),
        "bounded": (MARS | {"mars_price": 0.3, "mars_max_loss": 0.02}, {}),
        "limited": (MARS | {"mars_price": 0.4, "mars_max_loss": 0, "mars_limit": 1}, {}),
    }
    assert len(servers) == 5


def test_servers_take_turns_block_by_block(tmp_path):
    options = SweepOptions(
        prompts=(prompts_of(tmp_path / "p.jsonl", "aaaaa"),),
        block=2,
        repeats=2,
        temperatures=(0.0, 1.0),
    )
    sweep = load_sweep(options)
    ((_, turns),) = sweep.groups(0)
    assert len({turn.key for turn in turns}) == len(turns) == 2 * 2 * 3 * 2
    assert [(turn.cell.name, turn.block) for turn in turns[:6]] == [
        ("standard", 0),
        ("mars", 0),
        ("mars", 1),
        ("standard", 1),
        ("standard", 2),
        ("mars", 2),
    ]
    assert [len(sweep.block(number)) for number in range(3)] == [2, 2, 1]
    # All rules share the seeds; each prompt and pass has another.
    seeds = {}
    for turn in turns:
        seeds.setdefault((turn.repeat, turn.block), set()).add(sweep.seed(turn))
    assert all(len(first) == 1 for first in seeds.values())
    used = [
        first + number
        for (_, block), (first,) in seeds.items()
        for number in range(len(sweep.block(block)))
    ]
    assert len(set(used)) == len(used) == 10


def test_groups_of_servers():
    options = SweepOptions(methods=(AUTOREGRESSIVE, "standard", "mars"), num_prompts=1)
    groups = load_sweep(options).groups(2)
    assert [len(servers) for servers, _ in groups] == [2, 1]
    names = [[turn.cell.name for turn in turns] for _, turns in groups]
    assert names == [["autoregressive", "standard"], ["mars"]]


def test_prompts_are_taken_from_the_categories_in_turn(tmp_path):
    path = prompts_of(tmp_path / "p.jsonl", "aaabb")
    only_b = load_sweep(SweepOptions(prompts=(path,), num_prompts=3, categories=("b",)))
    assert [prompt.category for prompt in only_b.prompts] == ["b", "b"]
    sweep = load_sweep(SweepOptions(prompts=(path,), num_prompts=3))
    assert [prompt.id for prompt in sweep.prompts] == ["0", "3", "1"]
    with pytest.raises(ValueError, match="id '0' appears twice"):
        load_sweep(SweepOptions(prompts=(path, path)))


def prompts_of(path, categories):
    prompts = [{"id": i, "prompt": f"p {i}", "category": c} for i, c in enumerate(categories)]
    return write_prompts(path, prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is below 1"),
        ({"temperatures": (-1.0,)}, "temperature=-1.0 is below 0"),
        ({"temperatures": (float("nan"),)}, "temperature=nan is below 0"),
        ({"concurrencies": (0,)}, "concurrency=0 is below 1"),
        ({"num_speculative_tokens": (0,)}, "num_speculative_tokens=0 is below 1"),
        ({"values": {"theta": (1.7,)}}, r"mars_theta=1\.7 is outside"),
        ({"cells": ('x={"mars_prize": 1}',)}, "mars_prize"),
        ({"cells": ('x={"mars_price": 1, "mars_theta": 1}',)}, "mars_price"),
        ({"cells": ("x",)}, "cell='x' is not NAME=JSON; write such as"),
        ({"cells": ("x=[]",)}, "is not NAME=JSON"),
        ({"cells": ('x={"mars_price": 1}', 'x={"mars_price": 2}')}, "two rules are named 'x'"),
        ({"baseline": "none"}, "baseline='none' is no rule of this sweep; name one of standard"),
    ],
)
def test_bad_values_fail_before_anything_starts(options, message):
    with pytest.raises(ValueError, match=message):
        SweepOptions(**options)


def test_the_lock_refuses_lossy_rules(monkeypatch):
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    SweepOptions(methods=("autoregressive", "standard", "strict", "block"))
    for options in (
        {"values": {"price": (0.3,)}},
        {"methods": ("standard", "fly")},
        {"methods": ("synthetic",)},
    ):
        with pytest.raises(RuntimeError, match="VLLM_MARS_LOCK=strict forbids"):
            SweepOptions(**options)
