"""`vllm-mars top`: a server's speculation and margin-aware verification, live in a terminal."""

import contextlib
import math
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_mars.local import scrape

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

NEEDED = ()
TIMEOUT = 10.0
BAR_WIDTH = 24

RELAXED = "vllm:mars_relaxed_tokens_total"
VERIFIED = "vllm:mars_verified_positions_total"
GAINED = "vllm:mars_gained_acceptance_total"
ALLOWED = "vllm:mars_max_loss_nats_per_token"
REFUSED = "vllm:mars_refused_positions_total"
# There from the start, also on Ray Serve, which has no counter before it counts.
INFO = "vllm:mars_info"
ACCEPTED = scrape.ACCEPTED_PER_POSITION

# Sample name -> the label by which it is told apart; engines and models are added up.
_LABELS = {
    RELAXED: "position",
    VERIFIED: "position",
    GAINED: None,
    scrape.DRIFT_UP: None,
    scrape.DRIFT_DOWN: None,
    ALLOWED: None,
    INFO: None,
    REFUSED: "reason",
    scrape.LOST_NATS: None,
    scrape.DRAFTS: None,
    ACCEPTED: "position",
    scrape.GENERATED_TOKENS: None,
}


@dataclass(frozen=True)
class Snapshot:
    """The metrics of one moment, or their increase between two.

    Attributes:
        values: sample name -> label value ("" where there is none) -> value.
    """

    values: Mapping[str, Mapping[str, float]]

    def total(self, name: str) -> float:
        """The sum over all label values."""
        return sum(self.values.get(name, {}).values())

    def by_label(self, name: str) -> dict[str, float]:
        """Value by label, positions in their order."""
        values = self.values.get(name, {})
        return dict(sorted(values.items(), key=lambda item: (len(item[0]), item[0])))

    def since(self, earlier: "Snapshot") -> "Snapshot":
        """The increase since another snapshot; everything, if the server has begun anew."""
        increase = {
            name: {
                label: value - earlier.values.get(name, {}).get(label, 0.0) * (name != ALLOWED)
                for label, value in values.items()
            }
            for name, values in self.values.items()
        }
        if any(value < 0 for values in increase.values() for value in values.values()):
            return self
        return Snapshot(increase)

    @property
    def acceptance_length(self) -> float:
        """Tokens that a draft led to, the bonus or correction among them; NaN without drafts."""
        drafts = self.total(scrape.DRAFTS)
        return 1 + self.total(ACCEPTED) / drafts if drafts else math.nan

    def per_token(self, name: str) -> float:
        """A total by generated token; NaN without any."""
        generated = self.total(scrape.GENERATED_TOKENS)
        return self.total(name) / generated if generated else math.nan


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "top",
        help="watch what a running server gains and loses",
        description="Shows, from a running server's /metrics, tokens per second, acceptance "
        "length, what the rule gained and what it lost. Ctrl-C ends it.",
    )
    add = parser.add_argument
    add("url", metavar="URL", help="the server, such as http://localhost:8000, or the metrics port "
        "of a node of Ray Serve")  # fmt: skip
    add("--interval", type=float, default=2.0, metavar="SECONDS",
        help="between readings; default 2")  # fmt: skip
    add("--once", action="store_true", help="print the figures once and exit")


def metrics_url(url: str) -> str:
    """The address of a server's metrics; `url` may lack the scheme, or end in `/v1`.

    Raises:
        ValueError: it is no HTTP address.
    """
    full = url if "://" in url else f"http://{url}"
    parts = urllib.parse.urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"URL {url!r} is not an HTTP address; give the server's, such as http://localhost:8000."
        )
    base = full.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return f"{base}/metrics"


def read_metrics(url: str) -> Snapshot:
    """Reads a server's metrics once, at an address as `metrics_url` returns it.

    Raises:
        RuntimeError: nothing answers there, or not with the metrics of margin-aware verification.
    """
    values: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for name, labels, value in scrape.samples(url, TIMEOUT):
            if name in _LABELS:
                label = _LABELS[name]
                key = labels[label] if label else ""
                # Each engine says what is allowed.
                before = values[name][key]
                values[name][key] = max(before, value) if name == ALLOWED else before + value
    except OSError as error:
        raise RuntimeError(
            f"{url} does not answer: {error}; give the address of a running vLLM server."
        ) from error
    except (ValueError, KeyError) as error:
        raise RuntimeError(
            f"{url} answers, but not with Prometheus metrics ({error}); give the address of a "
            "running vLLM server."
        ) from error
    if not {INFO, VERIFIED} & values.keys():
        raise RuntimeError(
            f"{url} has no vllm:mars_* metrics; start the server with rejection_sample_method "
            "'mars' and without --disable-log-stats."
        )
    return Snapshot({name: dict(labels) for name, labels in values.items()})


def run(url: str, interval: float = 2.0, once: bool = False) -> int:
    """Shows a server until Ctrl-C, or `once`, with so many seconds between readings; returns 0.

    Raises:
        ValueError: a bad address or interval.
        RuntimeError: the server does not answer or has no such metrics.
    """
    from rich.console import Console
    from rich.live import Live

    if not 0 < interval < math.inf:
        raise ValueError(f"interval={interval:g} is not above 0; give seconds, such as 2.")
    address = metrics_url(url)
    total = read_metrics(address)
    if once:
        Console().print(view(total, None, 0.0))
        return 0
    read_at = time.monotonic()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(view(total, None, 0.0), auto_refresh=False) as live,
    ):
        while True:
            time.sleep(interval)
            latest, now = read_metrics(address), time.monotonic()
            live.update(view(latest, latest.since(total), now - read_at), refresh=True)
            total, read_at = latest, now
    return 0


def view(total: Snapshot, recent: Snapshot | None, seconds: float) -> "Group":
    """The figures since the server's start, and recent ones: those of the last `seconds`."""
    from rich.console import Group

    # The charts show the last interval, unless it was idle.
    shown, when = total, "since start"
    if recent is not None and recent.total(scrape.DRAFTS):
        shown, when = recent, f"last {seconds:.1f} s"
    return Group(_figures(total, recent, seconds), _positions(shown, when), _refusals(total))


def _figures(total: Snapshot, recent: Snapshot | None, seconds: float) -> "Table":
    shown = {"since start": total}
    if recent is not None:
        shown = {f"last {seconds:.1f} s": recent, **shown}
    table = _table("Margin-aware verification", "", *shown)
    if recent is not None:
        table.add_row("tokens/s", f"{recent.total(scrape.GENERATED_TOKENS) / seconds:.1f}", "")
    figures: dict[str, Callable[[Snapshot], str]] = {
        "generated tokens": lambda it: f"{it.total(scrape.GENERATED_TOKENS):.0f}",
        "mean acceptance length": lambda it: _number(it.acceptance_length, 2),
        "draft tokens gained": lambda it: f"{it.total(GAINED):.1f}",
        "gained, of accepted": lambda it: _percent(it.total(GAINED), it.total(ACCEPTED)),
        "relaxed outright": lambda it: f"{it.total(RELAXED):.0f}",
        "nats lost per token": lambda it: _number(it.per_token(scrape.LOST_NATS), 4),
        "drift per token": lambda it: _number(
            it.per_token(scrape.DRIFT_UP) - it.per_token(scrape.DRIFT_DOWN), 4
        ),
        "nats allowed per token": lambda it: _number(it.total(ALLOWED) or math.nan, 4),
    }
    for name, figure in figures.items():
        table.add_row(name, *map(figure, shown.values()))
    return table


def _positions(shown: Snapshot, when: str) -> "Table":
    """Per draft position, the share of drafts accepted there and the share relaxed there."""
    from rich.bar import Bar

    title = f"Of all drafts, by position ({when})"
    table = _table(title, "position", "accepted", "", "relaxed", "")
    drafts = shown.total(scrape.DRAFTS)
    relaxed = shown.by_label(RELAXED)
    for position, accepted in shown.by_label(ACCEPTED).items():
        row: list[str | Bar] = [position]
        for part in (accepted, relaxed.get(position, 0.0)):
            row += [_percent(part, drafts), Bar(max(drafts, 1.0), 0.0, part, width=BAR_WIDTH)]
        table.add_row(*row)
    return table


def _refusals(total: Snapshot) -> "Table":
    reasons = total.by_label(REFUSED)
    table = _table("Not relaxed because (since start)", *reasons)
    table.add_row(*(f"{count:.0f}" for count in reasons.values()))
    return table


def _table(title: str, *names: str) -> "Table":
    """Named columns hold numbers; the others names or bars."""
    from rich.table import Column, Table

    columns = (Column(name, justify="right" if name else "left") for name in names)
    return Table(*columns, title=title)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
