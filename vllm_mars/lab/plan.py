"""Plan of a sweep: its cells, servers and turns.

A rule is a named speculative config of vLLM; a cell is a rule at one temperature and load. In a
turn one server answers one block of prompts. Then the next server answers the same block, so that
a slowdown of the machine affects all of them.

Rules that differ only in the value of theta or price share a server, which gets the loosest value;
each request carries its value.
"""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mars.kernels.rules import PRICE, RULES, Rule
from vllm_mars.lab.prompts import PACKAGED, Prompt, load_prompts
from vllm_mars.models.drafts import NGRAM, RECOMMENDED, draft_config
from vllm_mars.options.config import (
    METHOD,
    OPTION_PREFIX,
    lossy_reason,
    split_speculative_config,
)
from vllm_mars.options.lock import check_lock

AUTOREGRESSIVE, STANDARD, STRICT = "autoregressive", "standard", "strict"
# Values of --method; others are rejection sample methods of vLLM.
METHODS: dict[str, dict[str, Any] | None] = {
    AUTOREGRESSIVE: None,
    STANDARD: {},
    STRICT: {PRICE.option: PRICE.strict},
    METHOD: RECOMMENDED,
}
NUM_SPECULATIVE_TOKENS = 4
# Seeds must differ between prompts and between passes.
_PASS_SEEDS = 100_000


class Cell(NamedTuple):
    """A rule at one temperature and load."""

    name: str  # of the rule, unique at each temperature and load
    config: dict[str, Any] | None  # vLLM's speculative config; None without speculation
    temperature: float
    concurrency: int

    @property
    def lossy_reason(self) -> str | None:
        """The lossy setting in words, or None if the rule is lossless."""
        config = self.config or {}
        method = config.get("rejection_sample_method", STANDARD)
        return lossy_reason(split_speculative_config(config)[0], method)


class Key(NamedTuple):
    name: str
    temperature: float
    concurrency: int
    repeat: int
    block: int


class Turn(NamedTuple):
    """One cell's requests of one block in one pass."""

    cell: Cell
    repeat: int
    block: int
    server: str  # speculative config of its server, as JSON
    body: dict[str, Any]  # further keys of each request's body

    @property
    def key(self) -> Key:
        name, _, temperature, concurrency = self.cell
        return Key(name, temperature, concurrency, self.repeat, self.block)


# Servers that run at the same time, and their turns in order.
Group = tuple[Sequence[str], Sequence[Turn]]


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep; `sweep_command` describes the others.

    Attributes:
        model: None for the packaged model.
        methods: keys of `METHODS`, or rejection sample methods of vLLM; None for "standard", and
            "mars" if there is no other rule.
        values: rule values by "theta" or "price"; each adds a rule to the sweep.
        cells: "NAME=JSON", a rule with any keys of vLLM's speculative config and any `mars_*`
            options; "draft" and "temperature" override the sweep's; null decodes without drafts.
        drafts, num_speculative_tokens: each rule is measured with each combination.
        baseline: rule in the denominator of ratios; None for the first.
        categories: prompt categories to use; () for all.
        num_prompts: number of prompts, taken from the categories in turn; 0 for all.
        seed: seed of the servers, from which the requests' seeds follow.
        side_by_side: servers at a time; 0 for all on a CPU and one on a GPU.
        examples: whether to record the relaxed tokens of greedy answers, for which each prompt is
            sent once more, untimed.
    """

    model: str | None = None
    methods: tuple[str, ...] | None = None
    values: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    cells: tuple[str, ...] = ()
    drafts: tuple[str, ...] = (NGRAM,)
    num_speculative_tokens: tuple[int, ...] = (NUM_SPECULATIVE_TOKENS,)
    baseline: str | None = None
    temperatures: tuple[float, ...] = (0.0,)
    concurrencies: tuple[int, ...] = (1,)
    prompts: tuple[str, ...] = (str(PACKAGED),)
    categories: tuple[str, ...] = ()
    num_prompts: int = 0
    max_tokens: int = 1024
    ignore_eos: bool = False
    block: int = 8
    repeats: int = 1
    seed: int = 0
    side_by_side: int = 0
    gpus: int = 1
    examples: bool = False
    startup_timeout: float = 600.0
    turn_timeout: float = 3600.0
    server_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_tokens", "block", "repeats", "gpus", "startup_timeout", "turn_timeout"):
            _check_least(name, getattr(self, name), 1)
        for name in ("num_prompts", "side_by_side"):
            _check_least(name, getattr(self, name), 0)
        for values, name, least in (
            (self.num_speculative_tokens, "num_speculative_tokens", 1),
            (self.concurrencies, "concurrency", 1),
            (self.temperatures, "temperature", 0),
        ):
            for value in values:
                _check_least(name, value, least)
        names = dict.fromkeys(cell.name for cell in self.all_cells())
        if self.base not in names:
            raise ValueError(
                f"baseline={self.baseline!r} is no rule of this sweep; name one of "
                f"{', '.join(names)}."
            )

    @property
    def base(self) -> str:
        return self.baseline or self.all_cells()[0].name

    def _rules(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        chosen = any(self.values.values()) or bool(self.cells)
        words = (STANDARD,) if chosen else (STANDARD, METHOD)
        for word in words if self.methods is None else self.methods:
            yield word, METHODS.get(word, {"rejection_sample_method": word})
        for rule, values in self.values.items():
            yield from ((f"{rule} {value:g}", {RULES[rule].option: value}) for value in values)
        yield from map(_parse_cell, self.cells)

    def all_cells(self) -> list[Cell]:
        """Returns the cells in the order of their rules; RuntimeError if the lock forbids one."""
        cells: dict[tuple[str, float, int], Cell] = {}
        for (name, rule), (draft, k) in itertools.product(
            self._rules(), itertools.product(self.drafts, self.num_speculative_tokens)
        ):
            options = dict(rule or {})
            temperature = options.pop("temperature", None)
            config = None
            label = name
            if rule is not None:
                if "draft" not in options and len(self.drafts) > 1:
                    label += f", {Path(draft).name}"
                if "num_speculative_tokens" not in options and len(self.num_speculative_tokens) > 1:
                    label += f", K {k}"
                drafts = draft_config(options.pop("draft", draft))
                config = {**drafts, "num_speculative_tokens": k, **options}
                if any(option.startswith(OPTION_PREFIX) for option in config):
                    config.setdefault("rejection_sample_method", METHOD)
            for at in self.temperatures if temperature is None else (temperature,):
                for load in self.concurrencies:
                    cell = Cell(label, config, float(at), load)
                    check_lock(cell.lossy_reason)
                    if cells.setdefault((label, cell.temperature, load), cell) != cell:
                        raise ValueError(f"two rules are named {label!r}; names must differ.")
        return list(cells.values())


@dataclass(frozen=True)
class Sweep:
    options: SweepOptions
    model: str
    prompts: tuple[Prompt, ...]

    def block(self, number: int) -> tuple[Prompt, ...]:
        size = self.options.block
        return self.prompts[number * size : (number + 1) * size]

    def seed(self, turn: Turn) -> int:
        """Returns the seed of a turn's first request; further requests add their number."""
        first = turn.block * self.options.block
        return self.options.seed + turn.repeat * _PASS_SEEDS + first

    def groups(self, side_by_side: int) -> list[Group]:
        """Returns all turns in groups of at most `side_by_side` servers; 0 is no limit."""
        options = self.options
        cells = options.all_cells()
        placements = _placements(cells)
        servers = list(dict.fromkeys(server for server, _ in placements))
        size = side_by_side or len(servers)
        points = dict.fromkeys((cell.temperature, cell.concurrency) for cell in cells)
        blocks = range(-(-len(self.prompts) // options.block))
        groups: list[Group] = []
        for first in range(0, len(servers), size):
            group_servers = servers[first : first + size]
            turns: list[Turn] = []
            order = itertools.product(range(options.repeats), points, blocks)
            for number, (repeat, point, block) in enumerate(order):
                here = [
                    Turn(cell, repeat, block, server, body)
                    for cell, (server, body) in zip(cells, placements, strict=True)
                    if server in group_servers and (cell.temperature, cell.concurrency) == point
                ]
                # The server that begins rotates.
                begin = number % max(len(here), 1)
                turns += here[begin:] + here[:begin]
            groups.append((group_servers, turns))
        return groups


def load_sweep(options: SweepOptions) -> Sweep:
    """Reads the prompts, or raises ValueError; the caller sets the packaged model's directory."""
    prompts: list[Prompt] = []
    for path in options.prompts:
        prompts += load_prompts(Path(path))
    counts = Counter(prompt.id for prompt in prompts)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"prompts: id {twice[0]!r} appears twice; ids must differ.")
    if options.categories:
        prompts = [prompt for prompt in prompts if prompt.category in options.categories]
    if options.num_prompts:
        per_category: Counter[str] = Counter()
        ranks = []
        for index, prompt in enumerate(prompts):
            ranks.append((per_category[prompt.category], index))
            per_category[prompt.category] += 1
        prompts = [prompts[index] for _, index in sorted(ranks)[: options.num_prompts]]
    return Sweep(options, options.model or "", tuple(prompts))


def _placements(cells: Sequence[Cell]) -> list[tuple[str, dict[str, Any]]]:
    """Returns each cell's server, as the JSON of its config, and the body of its requests."""
    families = [family(cell.config) for cell in cells]
    values: dict[str, set[float]] = {}
    for name, _, value in families:
        values.setdefault(name, set()).add(value)
    placements: list[tuple[str, dict[str, Any]]] = []
    for cell, (name, rule, value) in zip(cells, families, strict=True):
        if rule and len(values[name]) > 1:
            shared = {**json.loads(name), rule.option: rule.loosest(values[name])}
            server = json.dumps(shared, sort_keys=True)
            placements.append((server, {"vllm_xargs": {rule.option: value}}))
        else:
            placements.append((json.dumps(cell.config, sort_keys=True), {}))
    return placements


def family(config: dict[str, Any] | None) -> tuple[str, Rule | None, float]:
    """Returns a config without its rule's value, as JSON, the rule and the value.

    The rule is None if the config has none or if requests cannot choose its value.
    """
    rules = [rule for rule in RULES.values() if rule.option in (config or {})]
    if config is None or len(rules) != 1 or "mars_limit" in config:
        return json.dumps(config, sort_keys=True), None, 0.0
    (rule,) = rules
    # The rule's key remains, because strict by theta and strict by price are different servers.
    name = json.dumps({**config, rule.option: None}, sort_keys=True)
    return name, rule, config[rule.option]


def _parse_cell(text: str) -> tuple[str, dict[str, Any] | None]:
    name, equals, value = text.partition("=")
    try:
        options = json.loads(value)
    except ValueError:
        options = ()
    if not (name.strip() and equals) or not (options is None or isinstance(options, dict)):
        raise ValueError(
            f'cell={text!r} is not NAME=JSON; write such as \'bounded={{"mars_price": 0.3, '
            '"mars_max_loss": 0.02}\', or NAME=null for decoding without drafts.'
        )
    return name.strip(), options


def _check_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise ValueError(f"{name}={value} is below {least}; give {least} or more.")
