"""The rows of docs/validated.md: what `make gpu` measured of each rule on real servers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import markdown
from vllm_mars.experiments.records import read_sweep
from vllm_mars.experiments.report import gain
from vllm_mars.experiments.rows import Interval, rows, shown

COLUMNS = (
    *("model", "draft", "rule", "K", "batch", "speed, x standard", "tokens per answer"),
    *("nats per token", "same answers", "on"),
)
# Of a strict rule's greedy answers, those that equal those of `standard`: rounding changes some.
MOSTLY = 0.5


def rules(sweep: Path) -> list[dict[str, Any]]:
    """Each rule with drafts in a sweep's file, beside its baseline."""
    file = read_sweep(sweep)
    return [
        {
            "model": file.heads[-1].settings["model"] or "packaged",
            "draft": Path(row.cell.config.get("model") or row.cell.config["method"]).name,
            "k": row.cell.config["num_speculative_tokens"],
            **{"rule": row.cell.name, "batch": row.cell.concurrency, "lossy": row.cell.is_lossy},
            **{"problem": row.problem, "speed": gain(row), "tokens_per_answer": row.length},
            **{"nats_per_token": row.lost, "same": row.same},
        }
        for row in rows(file)
        if row.cell.config
    ]


def objections(found: Iterable[dict[str, Any]]) -> list[str]:
    """Why these rules are not validated: one failed, or a strict one answers otherwise."""
    reasons = []
    for rule in found:
        reason, same = rule["problem"].partition("\n")[0], rule["same"]
        if not reason and not rule["lossy"] and same and same[0] < MOSTLY:
            reason = f"{1 - same[0]:.0%} of its answers differ from those of strict verification"
        if reason:
            name = f"{rule['rule']}, {rule['model']}, {rule['draft']}, batch {rule['batch']}"
            reasons.append(f"{name}: {reason}")
    return reasons


def table(results: Iterable[dict[str, Any]]) -> list[str]:
    """The lines of the page's table: lossy rules whose speed and loss are known.

    Of the files that `benchmarks.gpu` wrote, a dry run and one with an objection give no row.
    """

    def text(of: Any, form: str) -> str:
        return shown(Interval(*of) if of else None, form)

    found = [
        (
            *(rule["model"], rule["draft"], rule["rule"], str(rule["k"]), str(rule["batch"])),
            text(rule["speed"], ".2f"),
            text(rule["tokens_per_answer"], ".1f"),
            text(rule["nats_per_token"], ".4f"),
            text(rule["same"], ".2f"),
            f"{result['hardware']['gpu']}, vLLM {result['versions']['vllm']}",
        )
        for result in results
        if not result["dry_run"] and not objections(result["rules"])
        for rule in result["rules"]
        if rule["lossy"] and rule["speed"] and rule["nats_per_token"]
    ]
    return markdown.table(COLUMNS, found) if found else ["Nothing has been validated yet."]
