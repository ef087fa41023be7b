"""Which cells a sweep measures, in which order, and which servers they need.

The grid is a union of parts, since the product of all axes would take days:

    quality   every rule (method and threshold) at every temperature, at the first concurrency
    load      the methods, MARS at the reference theta alone, at the other concurrencies and the
              first temperature
    extra     metrics "gap" and "price", and MARS without protected tokens at the reference theta,
              at the first concurrency and the first temperature

each for every draft, K, dataset and set of further options of MARS; `full_grid` takes the product
instead.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_mars.config import (
    METHOD,
    OPTION_PREFIX,
    check_value,
    lossy_reason,
    split_speculative_config,
)
from vllm_mars.experiments.metrics import METRICS, OPTION
from vllm_mars.experiments.sweep.datasets import PACKAGED_TASKS, Dataset
from vllm_mars.experiments.sweep.records import (
    METHODS,
    Cell,
    CellKey,
    Method,
    Metric,
    Settings,
    Status,
    further_options,
)
from vllm_mars.local.drafts import (
    CHOSEN_BY_REQUESTS,
    NGRAM,
    NO_DRAFT,
    draft_name,
    speculative_config,
)
from vllm_mars.local.provenance import describe_run
from vllm_mars.lock import check_lock

THETAS = (0.84, 0.88, 0.90, 0.92, 0.96, 1.0)


@dataclass(frozen=True)
class SweepOptions:
    """What to measure: the options of `vllm-mars sweep`, which explains them (`command`).

    The defaults take up to an hour on two CPU cores with the packaged model.

    Attributes:
        mars_options: each a JSON object of `mars_*` keys, "" for none; each rule is measured with
            each set, which takes a server of its own.
        num_prompts: prompts of each dataset, spread over its categories; 0 takes all.
        reference_theta: the theta of the parts "load" and "extra"; the nearest of `thetas`.
        side_by_side: servers that run at the same time, of whatever draft and K, so that their
            cells can take turns; 0 takes all of one draft and K on a CPU and 1 elsewhere.
        block: prompts of a file that a server is asked before the next takes its turn; 0 takes all.

    Raises:
        ValueError: a value is out of range or unknown.
        RuntimeError: the environment forbids lossy verification, but a rule is lossy.
    """

    model: str | None = None
    drafts: tuple[str, ...] = (NGRAM,)
    methods: tuple[Method, ...] = METHODS
    thetas: tuple[float, ...] = THETAS
    gaps: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0)
    prices: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    mars_options: tuple[str, ...] = ("",)
    unprotected: bool = True
    num_speculative_tokens: tuple[int, ...] = (4,)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    concurrencies: tuple[int, ...] = (1, 4, 16, 64)
    datasets: tuple[str, ...] = (str(PACKAGED_TASKS),)
    num_prompts: int = 16
    block: int = 0
    max_tokens: int = 80
    repeats: int = 3
    seed: int = 0
    reference_theta: float = 0.9
    full_grid: bool = False
    side_by_side: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    server_args: tuple[str, ...] = ()
    startup_timeout: float = 600.0
    cell_timeout: float = 3600.0
    margin: float = 0.05
    nll_margin: float = 0.05
    judge: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            for item in value if isinstance(value, tuple) else (value,):
                if item < least:
                    raise ValueError(f"{name}={item} is below {least}; give {least} or more.")
        object.__setattr__(self, "mars_options", tuple(map(_canonical, self.mars_options)))
        needed = (
            *("drafts", "num_speculative_tokens", "methods", "mars_options"),
            *("temperatures", "concurrencies", "datasets"),
        )
        for name in (*needed, "thetas", "gaps", "prices"):
            values = getattr(self, name)
            if name in needed and not values:
                raise ValueError(f"{name} is empty; give at least one.")
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={values} holds a value twice; give each once.")
        for method in self.methods:
            if method not in METHODS:
                raise ValueError(f"methods={method!r} is not one of {', '.join(METHODS)}.")
        if METHOD in self.methods and not any(self.thresholds.values()):
            raise ValueError(
                "method 'mars' needs thetas, gaps or prices; give some or leave it out."
            )
        check_value("theta", self.reference_theta, "reference_theta")
        for (metric, values), further in itertools.product(
            self.thresholds.items(), self.mars_options
        ):
            for value in values:
                given = {**CHOSEN_BY_REQUESTS[METRICS[metric]], **further_options(None, further)}
                config, _ = split_speculative_config({**given, OPTION[metric]: value})
                if METHOD in self.methods:
                    check_lock(lossy_reason(config, METHOD))
        if "fly" in self.methods:
            check_lock(lossy_reason(None, "fly"))

    @property
    def thresholds(self) -> dict[Metric, tuple[float, ...]]:
        """Those of MARS, by metric."""
        return {"ratio": self.thetas, "gap": self.gaps, "price": self.prices}

    def short(self) -> "SweepOptions":
        """The same within about five minutes on two idle cores: fewer and shorter answers."""
        return dataclasses.replace(
            self,
            thetas=(0.84, 0.90, 1.0),
            gaps=(),
            prices=(),
            unprotected=False,
            temperatures=(0.0,),
            concurrencies=(1, 4),
            num_prompts=4,
            max_tokens=32,
        )


_LEAST = {
    **dict.fromkeys(("temperatures", "num_prompts", "block", "side_by_side"), 0),
    **dict.fromkeys(("margin", "nll_margin"), 0),
    **dict.fromkeys(("num_speculative_tokens", "concurrencies", "max_tokens", "repeats"), 1),
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "startup_timeout", "cell_timeout"), 1),
}


@dataclass(frozen=True)
class ServerSpec:
    """One server configuration, in the words of `CellKey`; requests choose the threshold."""

    method: Method
    draft: str = NO_DRAFT
    k: int = 0
    metric: Metric | None = None
    protected: bool | None = None
    options: str = ""

    def speculative_config(self) -> dict[str, Any] | None:
        """vLLM's speculative config; None for autoregressive decoding."""
        if self.method == "autoregressive":
            return None
        options: dict[str, Any] = {}
        if self.metric is not None:
            options = dict(CHOSEN_BY_REQUESTS[METRICS[self.metric]])
            options |= further_options(self.protected, self.options)
        elif self.method != "standard":
            options["rejection_sample_method"] = self.method
        return speculative_config(self.draft, self.k, **options)

    @property
    def label(self) -> str:
        """A short name, also of the log file, such as "mars-ratio-ngram-K4"."""
        parts = [self.method, self.metric, None if self.protected is not False else "unprotected"]
        parts.append(re.sub(r"[^\w.]+", "-", self.options.replace(OPTION_PREFIX, "")).strip("-"))
        if self.k:
            parts += [draft_name(self.draft), f"K{self.k}"]
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Sweep:
    """What all cells of a sweep share, with its command line; plain data, so that Ray can send it.

    Raises:
        ValueError: two drafts or datasets would have one name in the cells.
    """

    options: SweepOptions
    model: str
    datasets: tuple[Dataset, ...]
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, names in (
            ("drafts", [draft_name(draft) for draft in self.options.drafts]),
            ("datasets", [dataset.name for dataset in self.datasets]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(
                    f"two {what} are named {twice.pop()!r}; rename a file or directory, since "
                    "cells are told apart by these names."
                )

    @cached_property
    def settings(self) -> Settings:
        """As the cells record them."""
        options = self.options
        return Settings(
            options.max_tokens,
            {dataset.name: dataset.count for dataset in self.datasets},
            options.seed,
            self.server_args,
            {dataset.name: dataset.checksum for dataset in self.datasets},
        )

    @property
    def server_args(self) -> tuple[str, ...]:
        """Arguments of every server besides those of the method and the platform."""
        options = self.options
        parallel = {
            "--tensor-parallel-size": options.tensor_parallel,
            "--pipeline-parallel-size": options.pipeline_parallel,
        }
        ranks = ((name, str(count)) for name, count in parallel.items() if count > 1)
        return (*itertools.chain.from_iterable(ranks), *options.server_args)

    def cell(
        self, key: CellKey, status: Status, reason: str, head: dict[str, Any], **measured: Any
    ) -> Cell:
        """A cell of this sweep, measured where `describe_run` gave `head`."""
        about = {it: head[it] for it in ("git_commit", "versions", "hardware", "load_average")}
        return Cell(
            key=key,
            status=status,
            reason=reason,
            settings=self.settings,
            theta_set_by="request" if key.method == METHOD else None,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            **({"speed": None, "acceptance": None, "outputs": ()} | about | measured),
        )

    def failed(self, key: CellKey, reason: str) -> Cell:
        """A cell that no node could measure."""
        return self.cell(key, "failed", reason, describe_run(None))


@dataclass(frozen=True)
class Group:
    """Cells that are measured together, each with its server; the servers run at the same time."""

    cells: tuple[tuple[CellKey, ServerSpec], ...]

    @property
    def servers(self) -> tuple[ServerSpec, ...]:
        """Those that a cell needs."""
        return tuple(dict.fromkeys(spec for _, spec in self.cells))

    def without(self, keys: set[CellKey]) -> "Group":
        """The group without these cells."""
        return Group(tuple(cell for cell in self.cells if cell[0] not in keys))


def plan(sweep: Sweep, side_by_side: int) -> list[Group]:
    """Lists the groups of a sweep, of so many servers at most; 0 is all of one draft and K.

    Returns:
        The groups in the order of measurement. Within a group servers take turns, and each dataset
        and each repeat starts with another one.
    """
    options, groups = sweep.options, []
    drafts = itertools.product(options.drafts, options.num_speculative_tokens)
    servers_of_drafts = [
        # The autoregressive server is shared: with the first draft alone.
        [spec for spec in _servers(options, draft, k) if spec.k or not number]
        for number, (draft, k) in enumerate(drafts)
    ]
    if side_by_side:
        servers_of_drafts = [list(itertools.chain.from_iterable(servers_of_drafts))]
    for mine in filter(None, servers_of_drafts):
        repeats = range(options.repeats)
        batches = [(mine, repeats)]
        if 0 < side_by_side < len(mine):
            batches = [
                (_turned(mine, repeat)[start : start + side_by_side], range(repeat, repeat + 1))
                for repeat in repeats
                for start in range(0, len(mine), side_by_side)
            ]
        for servers, passes in batches:
            cells = (_pass(sweep, servers, repeat) for repeat in passes)
            groups.append(Group(tuple(itertools.chain.from_iterable(cells))))
    return [group for group in groups if group.cells]


def _servers(options: SweepOptions, draft: str, k: int) -> Iterator[ServerSpec]:
    if "autoregressive" in options.methods:
        yield ServerSpec("autoregressive")
    for method in options.methods:
        if method == METHOD:
            for further in options.mars_options:
                for metric, values in options.thresholds.items():
                    if values:
                        yield ServerSpec(method, draft, k, metric, True, further)
                if options.unprotected and options.thetas:
                    yield ServerSpec(method, draft, k, "ratio", False, further)
        elif method != "autoregressive":
            yield ServerSpec(method, draft, k)


def _pass(
    sweep: Sweep, servers: list[ServerSpec], repeat: int
) -> Iterator[tuple[CellKey, ServerSpec]]:
    """One pass over the grid on these servers."""
    options = sweep.options
    points = itertools.product(
        enumerate(sweep.datasets, start=repeat), options.temperatures, options.concurrencies
    )
    for (turn, dataset), temperature, concurrency in points:
        for spec in _turned(servers, turn):
            values = _values(options, spec, temperature, concurrency)
            for value in values[:: -1 if repeat % 2 else 1]:
                threshold = dict.fromkeys(METRICS.values())
                if spec.metric is not None:
                    threshold[METRICS[spec.metric]] = value
                key = CellKey(
                    model=Path(sweep.model).name,
                    draft=draft_name(spec.draft),
                    method=spec.method,
                    metric=spec.metric,
                    **threshold,
                    protected=spec.protected,
                    k=spec.k,
                    temperature=float(temperature),
                    concurrency=concurrency,
                    dataset=dataset.name,
                    repeat=repeat,
                    options=spec.options,
                )
                yield key, spec


def _values(
    options: SweepOptions, spec: ServerSpec, temperature: float, concurrency: int
) -> list[float] | list[None]:
    """The thresholds of the cells that this server has at this point of the grid."""
    load = temperature == options.temperatures[0]
    quality = options.full_grid or concurrency == options.concurrencies[0]
    extra = options.full_grid or (quality and load)
    if spec.metric is None:
        return [None] if quality or load else []
    values = [float(value) for value in options.thresholds[spec.metric]]
    if spec.metric != "ratio":
        return values if extra else []
    if spec.protected and quality:
        return values
    reference = min(values, key=lambda theta: abs(theta - options.reference_theta))
    return [reference] if (load if spec.protected else extra) else []


def _canonical(options: str) -> str:
    """A set of options with its keys in order."""
    try:
        found = json.loads(options or "{}")
    except ValueError:
        found = None
    taken = set(OPTION.values())
    if not isinstance(found, dict) or not all(
        key.startswith(OPTION_PREFIX) and key not in taken for key in found
    ):
        raise ValueError(
            f"mars_options={options!r} is not a JSON object of mars_* options other than "
            f"{', '.join(sorted(taken))}, which the grid sets; give some such as "
            '{"mars_max_loss": 0.1}, or {} for none.'
        )
    return json.dumps(found, sort_keys=True) if found else ""


def _turned(servers: list[ServerSpec], turn: int) -> list[ServerSpec]:
    """The servers with another one first."""
    start = turn % len(servers)
    return servers[start:] + servers[:start]
