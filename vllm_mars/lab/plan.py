"""Which cells a sweep measures, on which servers, in which turns.

A rule is vLLM's speculative config under a name; a cell is a rule at one temperature and load. The
prompts are asked in blocks. In one turn a server answers one block; then the next server has its
turn with the same block, so that a machine that slows down slows all of them.

Rules that differ in the value of theta or price alone share a server, which has the loosest of
these, and each request brings its own.
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
# What a word of --method stands for; any other is a rejection sample method of vLLM.
METHODS: dict[str, dict[str, Any] | None] = {
    AUTOREGRESSIVE: None,
    STANDARD: {},
    STRICT: {PRICE.option: PRICE.strict},
    METHOD: RECOMMENDED,
}
NUM_SPECULATIVE_TOKENS = 4
# Answers to different prompts must not draw the same numbers, nor those of two passes.
_PASS_SEEDS = 100_000


class Cell(NamedTuple):
    """What is measured: a rule at one temperature and load.

    Attributes:
        name: of the rule; unique among the cells of one temperature and load.
        config: vLLM's speculative config; None without speculation.
    """

    name: str
    config: dict[str, Any] | None
    temperature: float
    concurrency: int

    @property
    def is_lossy(self) -> bool:
        """Whether the answers can differ from those of strict verification."""
        config = dict(self.config or {})
        method = config.get("rejection_sample_method", STANDARD)
        return lossy_reason(split_speculative_config(config)[0], method) is not None


class Key(NamedTuple):
    """A turn's name in the file, which holds each once."""

    name: str
    temperature: float
    concurrency: int
    repeat: int
    block: int


class Turn(NamedTuple):
    """One cell's requests of one block in one pass.

    Attributes:
        server: speculative config of its server, as JSON.
        body: what each request carries.
    """

    cell: Cell
    repeat: int
    block: int
    server: str
    body: dict[str, Any]

    @property
    def key(self) -> Key:
        """The turn's name."""
        name, _, temperature, concurrency = self.cell
        return Key(name, temperature, concurrency, self.repeat, self.block)

    def __str__(self) -> str:
        return (
            f"{self.cell.name}, temperature {self.cell.temperature:g}, {self.cell.concurrency} at "
            f"once, block {self.block}, pass {self.repeat}"
        )


# Turns in their order, and the servers that they need at the same time.
Group = tuple[Sequence[str], Sequence[Turn]]


@dataclass(frozen=True)
class SweepOptions:
    """What the user asks of a sweep.

    Attributes:
        model: None takes the packaged model.
        methods: words of `METHODS`, or vLLM's rejection sample methods; None for "standard", and
            "mars" where there is no other rule.
        values: of each rule, by its name; a rule of the sweep each.
        cells: "NAME=JSON": a rule with any keys of vLLM's speculative config and any `mars_*`
            options, and with "draft" and "temperature" where these are not the sweep's; null is
            decoding without drafts.
        drafts, num_speculative_tokens: each rule is measured with each of them.
        baseline: the rule that ratios are over; None for the first.
        categories: those of the prompts that are asked; all if there is none.
        num_prompts: how many, taken from the categories in turn; 0 takes all.
        max_tokens: longest answer.
        ignore_eos: whether each answer has that length.
        block: prompts of one turn.
        repeats: passes over all turns.
        seed: of the servers; each prompt's request has one of its own that follows from it.
        side_by_side: servers at a time; 0 for all on a CPU and one on a GPU.
        gpus: of one server, for a Ray cluster.
        examples: whether greedy lossy cells tell what was relaxed in each answer. Each prompt is
            asked once more for that, untimed.
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
        """The rule that ratios are over."""
        return self.baseline or self.all_cells()[0].name

    def _rules(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        chosen = any(self.values.values()) or bool(self.cells)
        words = (STANDARD,) if chosen else (STANDARD, METHOD)
        for word in words if self.methods is None else self.methods:
            yield word, METHODS.get(word, {"rejection_sample_method": word})
        for rule, found in self.values.items():
            yield from ((f"{rule} {value:g}", {RULES[rule].option: value}) for value in found)
        yield from map(_parse_cell, self.cells)

    def all_cells(self) -> list[Cell]:
        """The cells, the first rule's first.

        Raises:
            ValueError: an option is bad, or two rules have one name.
            RuntimeError: the environment forbids lossy verification.
        """
        found: dict[tuple[str, float, int], Cell] = {}
        for (name, given), (draft, k) in itertools.product(
            self._rules(), itertools.product(self.drafts, self.num_speculative_tokens)
        ):
            options = dict(given or {})
            temperature = options.pop("temperature", None)
            config, label = None, name
            if given is not None:
                if "draft" not in options and len(self.drafts) > 1:
                    label += f", {Path(draft).name}"
                if "num_speculative_tokens" not in options and len(self.num_speculative_tokens) > 1:
                    label += f", K {k}"
                drafts = draft_config(options.pop("draft", draft))
                config = {**drafts, "num_speculative_tokens": k, **options}
                if any(option.startswith(OPTION_PREFIX) for option in config):
                    config.setdefault("rejection_sample_method", METHOD)
                method = config.get("rejection_sample_method", STANDARD)
                check_lock(lossy_reason(split_speculative_config(config)[0], method))
            for at in self.temperatures if temperature is None else (temperature,):
                for load in self.concurrencies:
                    cell = Cell(label, config, float(at), load)
                    if found.setdefault((label, cell.temperature, load), cell) != cell:
                        raise ValueError(f"two rules are named {label!r}; names must differ.")
        return list(found.values())


@dataclass(frozen=True)
class Sweep:
    """The options, with what was found for them."""

    options: SweepOptions
    model: str
    prompts: tuple[Prompt, ...]

    def block(self, number: int) -> tuple[Prompt, ...]:
        """The prompts of one block."""
        size = self.options.block
        return self.prompts[number * size : (number + 1) * size]

    def seed(self, turn: Turn) -> int:
        """The seed of the first request of a turn; the others' follow."""
        first = turn.block * self.options.block
        return self.options.seed + turn.repeat * _PASS_SEEDS + first

    def groups(self, side_by_side: int) -> list[Group]:
        """All turns, in groups of so many servers; 0 sets no limit."""
        options = self.options
        cells = options.all_cells()
        places = _places(cells)
        servers = list(dict.fromkeys(server for server, _ in places))
        size = side_by_side or len(servers)
        points = dict.fromkeys((cell.temperature, cell.concurrency) for cell in cells)
        blocks = range(-(-len(self.prompts) // options.block))
        groups: list[Group] = []
        for first in range(0, len(servers), size):
            own = servers[first : first + size]
            turns: list[Turn] = []
            order = itertools.product(range(options.repeats), points, blocks)
            for number, (repeat, point, block) in enumerate(order):
                here = [
                    Turn(cell, repeat, block, server, body)
                    for cell, (server, body) in zip(cells, places, strict=True)
                    if server in own and (cell.temperature, cell.concurrency) == point
                ]
                # Each time another one begins.
                begin = number % max(len(here), 1)
                turns += here[begin:] + here[:begin]
            groups.append((own, turns))
        return groups


def load_sweep(options: SweepOptions) -> Sweep:
    """Reads the prompts; the model's directory is still to be set where it is the packaged one.

    Raises:
        ValueError: a file cannot be read, or two prompts have one id.
    """
    found: list[Prompt] = []
    for path in options.prompts:
        found += load_prompts(Path(path))
    twice = [name for name, count in Counter(it.id for it in found).items() if count > 1]
    if twice:
        raise ValueError(f"prompts: id {twice[0]!r} appears twice; ids must differ.")
    if options.categories:
        found = [item for item in found if item.category in options.categories]
    if options.num_prompts:
        before: Counter[str] = Counter()
        ranks = []
        for place, item in enumerate(found):
            ranks.append((before[item.category], place))
            before[item.category] += 1
        found = [found[place] for _, place in sorted(ranks)[: options.num_prompts]]
    return Sweep(options, options.model or "", tuple(found))


def _places(cells: Sequence[Cell]) -> list[tuple[str, dict[str, Any]]]:
    """Each cell's server, as the JSON of its config, and what the cell's requests carry."""
    families = [family(cell.config) for cell in cells]
    values: dict[str, set[float]] = {}
    for name, _, value in families:
        values.setdefault(name, set()).add(value)
    found: list[tuple[str, dict[str, Any]]] = []
    for cell, (name, rule, value) in zip(cells, families, strict=True):
        if rule and len(values[name]) > 1:
            shared = {**json.loads(name), rule.option: rule.loosest(values[name])}
            server = json.dumps(shared, sort_keys=True)
            found.append((server, {"vllm_xargs": {rule.option: value}}))
        else:
            found.append((json.dumps(cell.config, sort_keys=True), {}))
    return found


def family(config: dict[str, Any] | None) -> tuple[str, Rule | None, float]:
    """A config without its rule's value, as JSON, the rule, and the value that a request can bring.

    Without a rule, or where a request cannot choose, there is none.
    """
    rules = [rule for rule in RULES.values() if rule.option in (config or {})]
    if config is None or len(rules) != 1 or "mars_limit" in config:
        return json.dumps(config, sort_keys=True), None, 0.0
    (rule,) = rules
    # Strict by theta and strict by price are different servers.
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
