"""The rows of docs/validated.md: what `make gpu` measured of each rule on real servers."""

from collections.abc import Iterable
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from benchmarks import markdown
from vllm_mars.experiments.columns import shown
from vllm_mars.experiments.sweep.measured import measure
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.summary import Row, rows

COLUMNS = (
    *("model", "draft", "rule", "K", "batch", "tokens/s, x strict", "sooner, x strict"),
    *("tokens per answer", "nats per token", "agree", "on"),
)


def rules(sweep: Path) -> list[dict[str, Any]]:
    """Each greedy rule in a sweep's file, beside `standard` with its draft and load."""

    def point(row: Row) -> tuple[Any, ...]:
        return row.key.model, row.key.draft, row.key.k, row.key.dataset, row.key.concurrency

    found: list[dict[str, Any]] = []
    greedy = [row for row in rows(read_cells(sweep)) if row.key.k and not row.key.temperature]
    points = groupby(sorted(greedy, key=point), point)
    for it in chain.from_iterable(measure(list(group)) for _, group in points):
        key, quality = it.row.key, [cell.quality for cell in it.row.cells if cell.quality]
        agreement, identity = map(it.row.estimate, ("agreement", "identity"))
        found.append(
            {
                **{"model": key.model, "draft": key.draft, "rule": key.rule, "k": key.k},
                **{"batch": key.concurrency, "lossy": key.lossy, "problem": it.row.problem},
                **{"tokens_per_second_x_strict": it.speedup, "sooner_x_strict": it.sooner},
                **{"tokens_per_answer": it.length, "nats_per_token": it.loss},
                "agreement": agreement and agreement.value,
                "identity": identity and identity.value,
                "prompts": max((score.samples for score in it.row.estimates), default=0),
                "notes": sorted({note for one in quality for note in one.notes}),
            }
        )
    return found


def objections(found: Iterable[dict[str, Any]]) -> list[str]:
    """Why these rules are not validated: one failed, or a strict one is not shown to be strict."""
    reasons = []
    for rule in found:
        reason = rule["problem"].partition("\n")[0]
        if not reason and not rule["lossy"] and rule["identity"] != 1:
            reason = "its answers were not judged"
            if rule["identity"] is not None:
                reason = f"{1 - rule['identity']:.0%} of its answers differ by more than ties"
        if reason:
            name = f"{rule['rule']}, {rule['model']}, {rule['draft']}, batch {rule['batch']}"
            reasons.append(f"{name}: {reason}")
    return reasons


def table(results: Iterable[dict[str, Any]]) -> list[str]:
    """The lines of the page's table: rules below strict whose speed, loss and agreement are known.

    Of the files that `benchmarks.gpu` wrote, a dry run and one with an objection give no row.
    """
    rows = [
        (
            *(rule["model"], rule["draft"], rule["rule"], str(rule["k"]), str(rule["batch"])),
            shown(*rule["tokens_per_second_x_strict"]),
            shown(*rule["sooner_x_strict"]),
            f"{rule['tokens_per_answer'][0]:.1f}",
            shown(*rule["nats_per_token"], form=".4f"),
            f"{rule['agreement']:.2f}",
            f"{result['hardware']['gpu']}, vLLM {result['versions']['vllm']}",
        )
        for result in results
        if not result["dry_run"] and not objections(result["rules"])
        for rule in result["rules"]
        if rule["lossy"] and None not in (rule["nats_per_token"], rule["agreement"])
    ]
    return markdown.table(COLUMNS, rows) if rows else ["Nothing has been validated yet."]
