"""Which cells and servers a sweep plans, and what it refuses before anything starts."""

import json
from collections import Counter
from dataclasses import replace

import filelock
import pytest

from report_files import make_cell
from vllm_mars.cli import main
from vllm_mars.experiments.sweep.datasets import PACKAGED_TASKS, Sql, load_dataset
from vllm_mars.experiments.sweep.methods_here import Platform
from vllm_mars.experiments.sweep.plan import ServerSpec, Sweep, SweepOptions, plan
from vllm_mars.experiments.sweep.ray_cells import _needed
from vllm_mars.experiments.sweep.record_file import append_cell
from vllm_mars.experiments.sweep.run import run_sweep
from vllm_mars.experiments.sweep.runners import LocalRunner
from vllm_mars.experiments.sweep.summary import rows
from vllm_mars.local.drafts import NGRAM_CONFIG

TASKS = load_dataset(str(PACKAGED_TASKS), 4)
CPU = Platform("cpu", None, "0.32.0", ("standard", "synthetic", "block"))
CUDA = Platform("cuda", "H200", "0.33.0", ("standard", "synthetic", "block", "fly"))


def keys_of(groups):
    return [key for group in groups for key, _ in group.cells]


def test_the_default_grid():
    (group,) = plan(Sweep(SweepOptions(), "model", (TASKS,)), 0)
    keys = [key for key, _ in group.cells]
    assert len(keys) == len(set(keys))
    counts = Counter((key.rule, key.temperature, key.concurrency) for key in keys)
    # Three repeats of everything.
    assert set(counts.values()) == {3}
    rules = {"autoregressive", "standard", "block", "fly"}
    thetas = {f"mars {theta:g}" for theta in (0.84, 0.88, 0.9, 0.92, 0.96, 1.0)}
    extra = {"mars gap 0.5", "mars gap 1", "mars gap 2", "mars gap 3", "mars 0.9 unprotected"}
    extra |= {"mars price 0.1", "mars price 0.25", "mars price 0.5", "mars price 1"}
    assert {c[0] for c in counts if c[1:] == (0.0, 1)} == rules | thetas | extra
    assert {c[0] for c in counts if c[1:] == (1.0, 1)} == rules | thetas
    for load in (4, 16, 64):
        assert {c[0] for c in counts if c[1:] == (0.0, load)} == rules | {"mars 0.9"}
    assert not [c for c in counts if c[1] == 1.0 and c[2] > 1]
    for key, server in group.cells:
        assert server.method == key.method
        assert server.metric == key.metric


def test_the_full_grid_is_the_product():
    options = SweepOptions(full_grid=True, repeats=1)
    keys = keys_of(plan(Sweep(options, "model", (TASKS,)), 0))
    assert len(keys) == len(set(keys)) == (4 + 6 + 4 + 4 + 1) * 2 * 4


def test_each_rule_is_measured_with_each_set_of_further_options():
    further = ("{}", '{"mars_max_relaxed_share": 0.1, "mars_client_control": true}')
    options = SweepOptions(
        **{"methods": ("standard", "mars"), "thetas": (), "gaps": (1.0,), "prices": (0.25, 0.5)},
        **{"mars_options": further, "repeats": 1},
    )
    groups = plan(Sweep(options, "model", (TASKS,)), 0)
    rules = [key.rule for key in keys_of(groups) if key.method == "mars"]
    words = " client_control true max_relaxed_share 0.1"
    plain = ["mars gap 1", "mars price 0.25", "mars price 0.5"]
    assert rules == [*plain, *(rule + words for rule in plain)]
    servers = [server for server in groups[0].servers if server.method == "mars"]
    assert servers[0].speculative_config().keys() & json.loads(further[1]).keys() == set()
    assert servers[3].speculative_config() == {
        **{**NGRAM_CONFIG, "num_speculative_tokens": 4, "rejection_sample_method": "mars"},
        **{"mars_metric": "price", "mars_price": 0.0, "mars_price_max": 16384},
        **{"mars_max_relaxed_share": 0.1, "mars_client_control": True},
    }
    assert servers[3].label == "mars-price-client_control-true-max_relaxed_share-0.1-ngram-K4"


def test_repeats_start_with_another_server_and_turn_thetas_round():
    options = SweepOptions(
        methods=("autoregressive", "standard", "mars"), gaps=(), prices=(), unprotected=False
    ).short()
    keys = keys_of(plan(Sweep(options, "model", (TASKS,)), 0))
    first = {repeat: [k.rule for k in keys if k.repeat == repeat][:5] for repeat in (0, 1, 2)}
    assert first[0] == ["autoregressive", "standard", "mars 0.84", "mars 0.9", "mars 1"]
    assert first[1] == ["standard", "mars 1", "mars 0.9", "mars 0.84", "autoregressive"]
    assert first[2] == ["mars 0.84", "mars 0.9", "mars 1", "autoregressive", "standard"]


def test_servers_that_do_not_fit_side_by_side_are_split():
    options = SweepOptions(repeats=2)
    whole = set(keys_of(plan(Sweep(options, "model", (TASKS,)), 0)))
    for side_by_side in (1, 2, 8):
        groups = plan(Sweep(options, "model", (TASKS,)), side_by_side)
        assert max(len(group.servers) for group in groups) <= side_by_side
        keys = keys_of(groups)
        assert len(keys) == len(set(keys))
        assert set(keys) == whole


def test_several_drafts_share_the_autoregressive_cells(tmp_path):
    options = SweepOptions(drafts=("ngram", str(tmp_path)), repeats=1)
    options = replace(options, num_speculative_tokens=(2, 4))
    groups = plan(Sweep(options, "model", (TASKS,)), 0)
    assert [len(group.servers) for group in groups] == [8, 7, 7, 7]
    keys = keys_of(groups)
    assert len(keys) == len(set(keys))
    plain = [key for key in keys if key.method == "autoregressive"]
    # Two temperatures at the first concurrency, three more concurrencies.
    assert len(plain) == 5
    alone = replace(options, methods=("autoregressive",), temperatures=(0.0,))
    for side_by_side in (0, 1):
        keys = keys_of(plan(Sweep(alone, "model", (TASKS,)), side_by_side))
        assert [key.concurrency for key in keys] == [1, 4, 16, 64]


def test_drafts_that_run_side_by_side_take_turns(tmp_path):
    options = SweepOptions(
        drafts=("ngram", str(tmp_path)), methods=("autoregressive", "standard"), repeats=2
    ).short()
    sweep = Sweep(options, "model", (TASKS,))
    (group,) = plan(sweep, 3)
    assert len(group.servers) == 3
    starts = {}
    for key in keys_of([group]):
        starts.setdefault(key.repeat, key.draft)
    assert starts == {0: "none", 1: "ngram"}
    assert set(keys_of([group])) == set(keys_of(plan(sweep, 0)))


def test_a_group_without_measured_cells_keeps_only_servers_that_it_needs():
    (group,) = plan(Sweep(SweepOptions(repeats=1), "model", (TASKS,)), 0)
    gaps = {key for key in keys_of([group]) if key.metric == "gap"}
    left = group.without(set(keys_of([group])) - gaps)
    assert {key for key, _ in left.cells} == gaps
    assert [server.metric for server in left.servers] == ["gap"]
    assert {server for _, server in left.cells} == set(left.servers)
    assert group.without(set()) == group
    assert group.without(set(keys_of([group]))).cells == ()


def test_speculative_configs(tmp_path):
    assert ServerSpec("autoregressive").speculative_config() is None
    ngram = {**NGRAM_CONFIG, "num_speculative_tokens": 3}
    assert ServerSpec("standard", "ngram", 3).speculative_config() == ngram
    assert ServerSpec("block", "ngram", 3).speculative_config() == {
        **ngram,
        "rejection_sample_method": "block",
    }
    # A request that chooses nothing is verified strictly, and it may choose everything.
    assert ServerSpec("mars", "ngram", 3, "ratio", True).speculative_config() == {
        **ngram,
        "rejection_sample_method": "mars",
        "mars_theta": 1.0,
        "mars_theta_min": 0.0,
        "mars_metric": "ratio",
    }
    gap = ServerSpec("mars", "org/draft", 2, "gap", False)
    assert gap.speculative_config() == {
        "model": "org/draft",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "mars",
        "mars_gap": 0.0,
        "mars_gap_max": 16384,
        "mars_metric": "gap",
        "mars_protected_token_ids": [],
    }
    assert gap.label == "mars-gap-unprotected-draft-K2"


def test_methods_that_cannot_run_say_why():
    for method in ("autoregressive", "standard", "mars"):
        assert CPU.why_not(ServerSpec(method)) is None
    assert "0.32.0 has no rejection_sample_method 'fly' (it has" in CPU.why_not(ServerSpec("fly"))
    assert "only in its V2 model runner" in CPU.why_not(ServerSpec("block"))
    newer = Platform("cpu", None, "0.33.0", CUDA.methods)
    assert newer.why_not(ServerSpec("fly")) == "vLLM has no 'fly' on a CPU."
    assert CUDA.why_not(ServerSpec("fly")) is None
    assert CUDA.why_not(ServerSpec("block")) is None
    assert CPU.why_not(ServerSpec("standard"), 0.0) is None
    assert "compare with theta 1" in CPU.why_not(ServerSpec("standard"), 0.7)
    assert CUDA.why_not(ServerSpec("standard"), 0.7) is None
    for method in ("autoregressive", "mars"):
        assert CPU.why_not(ServerSpec(method), 0.7) is None
    assert "only in its V2 model runner" in CUDA.why_not_in_log(ServerSpec("block"), "V1")
    assert CUDA.why_not_in_log(ServerSpec("block"), "INFO Using V2 Model Runner") is None
    assert CUDA.why_not_in_log(ServerSpec("standard"), "") is None


def test_a_server_that_no_cell_can_use_is_not_started(tmp_path):
    options = SweepOptions(
        model=str(tmp_path), methods=("standard",), temperatures=(1.0,), concurrencies=(1,)
    )
    sweep = Sweep(options, str(tmp_path), (TASKS,))
    (group,) = plan(sweep, 0)
    for cell in LocalRunner(sweep, tmp_path / "logs", CPU).run([group]):
        assert cell.status == "unavailable" and "compare with theta 1" in cell.reason
    assert not (tmp_path / "logs").exists(), "a server was started"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"thetas": (0.9, 1.7)}, r"mars_theta=1\.7 is outside \(0, 1\]"),
        ({"gaps": (-1.0,)}, r"mars_gap=-1\.0 is outside \[0, inf\)"),
        ({"methods": ("best",)}, "methods='best' is not one of autoregressive, standard"),
        ({"methods": ()}, "methods is empty; give at least one"),
        ({"num_speculative_tokens": (4, 0)}, "num_speculative_tokens=0 is below 1"),
        ({"num_speculative_tokens": (4, 4)}, r"_tokens=\(4, 4\) holds a value twice"),
        ({"thetas": (0.9, 0.90)}, r"thetas=\(0.9, 0.9\) holds a value twice"),
        ({"prices": (1, 1.0)}, "holds a value twice"),
        ({"concurrencies": (0,)}, "concurrencies=0 is below 1"),
        ({"temperatures": (-0.5,)}, r"temperatures=-0\.5 is below 0"),
        ({"repeats": 0}, "repeats=0 is below 1"),
        ({"max_tokens": 0}, "max_tokens=0 is below 1"),
        ({"prices": (-1.0,)}, r"mars_price=-1\.0 is outside \[0, inf\)"),
        (
            {"thetas": (), "gaps": (), "prices": ()},
            "method 'mars' needs thetas, gaps or prices; give some",
        ),
        ({"reference_theta": 0.0}, r"reference_theta=0\.0 is outside \(0, 1\]"),
        ({"mars_options": ("{",)}, r"mars_options='{' is not a JSON object of mars_\* options"),
        (
            {"mars_options": ('{"theta": 1}',)},
            r"is not a JSON object of mars_\* options other than",
        ),
        ({"mars_options": ('{"mars_price": 1}',)}, "mars_theta, which the grid sets"),
        ({"mars_options": ('{"mars_max": 1}',)}, "mars_max is not an option of margin-aware"),
        ({"mars_options": ("", "{}")}, "holds a value twice"),
    ],
)
def test_a_bad_option_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        SweepOptions(**change)


def test_the_lock_forbids_lossy_rules(monkeypatch):
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    with pytest.raises(RuntimeError, match=r"VLLM_MARS_LOCK=strict forbids .* mars_theta=0\.84"):
        SweepOptions()
    with pytest.raises(RuntimeError, match=r"forbids .* mars_gap=0\.5"):
        SweepOptions(thetas=(1.0,))
    with pytest.raises(RuntimeError, match=r"forbids .* mars_price=0\.1"):
        SweepOptions(thetas=(1.0,), gaps=())
    with pytest.raises(RuntimeError, match="forbids .*method='fly' is lossy"):
        SweepOptions(methods=("standard", "fly"))
    SweepOptions(methods=("standard",))
    SweepOptions(methods=("standard", "mars"), thetas=(1.0,), gaps=(), prices=(0.0,))


def test_two_datasets_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two datasets are named 'tasks'"):
        Sweep(SweepOptions(), "model", (TASKS, TASKS))
    drafts = (str(tmp_path / "a" / "x"), str(tmp_path / "b" / "x"))
    with pytest.raises(ValueError, match="two drafts are named 'x'"):
        Sweep(SweepOptions(drafts=drafts), "model", (TASKS,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"model": "0" * 64, "draft": None}}, "other weights of the model 'tiny'"),
        ({"prompts": "other"}, "other prompts named 'prompts'; name another file, or give the"),
        ({"tensor_parallel": 2}, r"server_args=\(\), but this sweep has \('--tensor-parallel-si"),
    ],
)
def test_a_file_of_another_sweep_is_refused(tmp_path, tiny_model, changes, message):
    (tmp_path / "tiny").symlink_to(tiny_model)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    prompts.write_text('{"prompt": "one"}')
    options = SweepOptions(model=str(tmp_path / "tiny"), datasets=(str(prompts),), max_tokens=8)
    settings = Sweep(options, options.model, (load_dataset(str(prompts), 0),)).settings
    cell = replace(make_cell("mars", 0.9, 4, 40.0, 1, 0), settings=settings)
    append_cell(output, replace(cell, weights=changes.get("weights", {})))
    before = output.read_bytes()
    prompts.write_text(f'{{"prompt": "{changes.get("prompts", "one")}"}}')
    options = replace(options, tensor_parallel=changes.get("tensor_parallel", 1))
    with pytest.raises(ValueError, match=message):
        run_sweep(options, output)
    assert output.read_bytes() == before


def test_a_file_in_use_is_not_moved(tmp_path):
    output = tmp_path / "run.jsonl"
    append_cell(output, make_cell("mars", 0.9, 4, 40.0, 1, 0))
    with filelock.FileLock(f"{output}.lock"), pytest.raises(RuntimeError, match="is in use by"):
        run_sweep(SweepOptions(model=str(tmp_path)), output, anew=True)
    assert output.exists()


def test_a_task_takes_a_whole_node():
    nodes = [{"CPU": 1.0}, {"CPU": 16.0}, {"memory": 1.0}]
    assert _needed(SweepOptions(), nodes) == {"num_cpus": 16.0, "num_gpus": 0}


def test_packaged_tasks():
    everything = load_dataset(str(PACKAGED_TASKS), 0)
    assert everything.count == len(everything.items) == 24
    assert everything.name == "tasks"
    assert [item.category for item in TASKS.items] == ["math", "code", "json", "summary"]
    assert sum(item.answer is not None for item in everything.items) == 6
    assert sum(item.test is not None for item in everything.items) == 6
    assert sum(item.schema is not None for item in everything.items) == 6


def test_published_formats_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = [
        {"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 1,002"},
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n",
            "entry_point": "f",
            "test": "def check(candidate):\n    pass\n",
            "canonical_solution": "    return x\n",
        },
        {"question_id": 70, "turns": ["first", "second"], "reference": ["a", "#### -3.5"]},
        {"prompt": "?", "schema": {}, "expected": [1]},
        {"prompt": "?", "sql": {"setup": "CREATE TABLE a (b)", "query": "SELECT b FROM a"}},
        {"prompt": "?", "accepted": ["Paris"]},
        {"prompt": "Hello"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    math, code, turns, value, sql, fact, chat = items = load_dataset(str(path), 0).items
    assert (math.id, math.answer) == ("1", "1,002")
    assert math.prompt.endswith("1 + 1?") and "####" in math.prompt
    assert (code.id, code.entry_point, code.code) == ("HumanEval/0", "f", "def f(x):\n")
    assert code.prompt.endswith("```python\ndef f(x):\n```")
    assert (turns.id, turns.prompt, turns.answer) == ("70", "first", "-3.5")
    assert (value.schema, value.expected, fact.accepted) == ({}, [1], ("Paris",))
    assert sql.sql == Sql("CREATE TABLE a (b)", "SELECT b FROM a", ordered=False)
    assert [item.is_task for item in items] == [item is not chat for item in items]


def test_datasets_of_vllm():
    dataset = load_dataset("vllm:sharegpt:some/file.json", 8)
    assert dataset.name == "vllm-sharegpt-file" and dataset.count == 8
    assert dataset.vllm_args == ("--dataset-name", "sharegpt", "--dataset-path", "some/file.json")
    assert load_dataset("vllm:random", 2).vllm_args == ("--dataset-name", "random")
    with pytest.raises(ValueError, match="say how many prompts vLLM draws"):
        load_dataset("vllm:random", 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; give one JSON object with .prompt. per line"),
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not a JSON object"),
        ('{"prompt": 3}', "line 1 has neither 'prompt', 'turns' nor 'question'"),
        ('{"prompt": "a", "schema": 3}', "line 1: 'schema' is not an object"),
        ('{"prompt": "a", "test": "x"}', "line 1: 'test' needs to be code, with the 'entry_point'"),
        ('{"prompt": "a", "expected": 1}', "line 1: 'expected' without a 'schema'"),
        ('{"prompt": "a", "sql": {"query": "b"}}', "line 1: 'sql' needs to be an object with"),
        ('{"prompt": "a", "sql": {"setup": "b", "query": ""}}', "'setup' and 'query' .texts."),
        ('{"prompt": "a", "accepted": [1]}', "line 1: 'accepted' is not a list of texts"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}', "id '1' appears twice"),
    ],
)
def test_a_bad_prompt_file_is_named(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_dataset(str(path), 0)
    with pytest.raises(ValueError, match="cannot be read"):
        load_dataset(str(tmp_path / "none.jsonl"), 0)


def test_the_command_names_what_is_wrong(tmp_path, capsys):
    output = tmp_path / "x.jsonl"
    for arguments, message in (
        (["--theta", "2"], "mars_theta=2.0 is outside (0, 1]"),
        (["--prompts", str(tmp_path / "none")], "none cannot be read"),
        (["--output", str(tmp_path)], "cannot be written; name a file in another directory"),
        (["--draft", str(tmp_path)], "has no config.json"),
    ):
        assert main(["sweep", "--output", str(output), *arguments]) == 1
        assert message in capsys.readouterr().err
    assert not output.exists()


def test_blocks_take_turns_and_count_as_one_dataset(tmp_path):
    path = tmp_path / "many#1.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(5)))
    (whole,) = load_dataset(str(path), 0).blocks(0)
    blocks = tuple(whole.blocks(2))
    assert [(block.name, block.count) for block in blocks] == [
        *(("many#1#0", 2), ("many#1#1", 2), ("many#1#2", 1)),
    ]
    assert [item for block in blocks for item in block.items] == list(whole.items)
    options = SweepOptions(
        **{"methods": ("autoregressive", "standard"), "repeats": 2, "block": 2},
        **{"temperatures": (0.0,), "concurrencies": (1,)},
    )
    keys = keys_of(plan(Sweep(options, "model", blocks), 0))
    assert {key.prompts for key in keys} == {"many#1"} != {whole.name, "many"}
    first = {(key.repeat, key.dataset): key.method for key in reversed(keys)}
    names = [block.name for block in blocks]
    assert [first[0, name] for name in names] == ["autoregressive", "standard", "autoregressive"]
    assert [first[1, name] for name in names] == ["standard", "autoregressive", "standard"]
    vllms = load_dataset("vllm:random", 3)
    assert vllms.blocks(2) == [vllms]


def test_no_cells_give_no_rows():
    assert rows([]) == []
