"""Tables of the docs that compare rules at equal loss, measured and simulated."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from benchmarks.markdown import described
from benchmarks.sweep_tables import GUARD, NO_GUARD, looseness, raw, rule_name
from vllm_mars.experiments.columns import Columns, at
from vllm_mars.experiments.metrics import METRICS

BOUND = " max_loss "

FRONTIER: Columns = {
    "rule": lambda of: rule_name(of["rule"]),
    "acceptance length": at("acceptance_length", ".2f"),
    "above strict, %": at("extra_acceptance", ".1f", 100),
    "nats lost per token": at("loss", ".4f"),
    "tokens per answer": at("tokens_per_answer", ".1f"),
    "repeated 4-grams": at("repeated_4grams", ".3f"),
}
SPEEDS: Columns = {
    **{name: FRONTIER[name] for name in ("rule", "acceptance length")},
    "nats lost per token": at("loss/value", ".3f"),
    "ms to the first token": at("ttft_seconds/value", ".0f", 1000),
    "ms per further token": at("tpot_seconds/value", ".1f", 1000),
    "speed of further tokens, x strict": at("strict_tpot_over_tpot", ".2f"),
    "seconds per answer": at("seconds_per_answer/value", ".2f"),
    **{name: FRONTIER[name] for name in ("tokens per answer", "repeated 4-grams")},
}


def drafted(name: str, draft: str) -> dict[str, Any]:
    """A comparison at equal loss, of one draft and K."""
    found: dict[str, Any] = raw(name)["drafts"][draft]
    return found


def frontier(columns: Columns, name: str, draft: str) -> list[str]:
    """Each rule of a comparison at equal loss."""
    found = drafted(name, draft)["rules"]
    return described(columns, sorted(found, key=lambda of: looseness(of["rule"])))


def bounded(name: str, draft: str) -> list[str]:
    """The rules of a comparison with a bound on the loss, each below itself without one."""
    parts = {of["rule"]: rule_name(of["rule"]).split(BOUND) for of in drafted(name, draft)["rules"]}
    rules = {rule for rule, *bound in parts.values() if bound}

    def order(of: dict[str, Any]) -> tuple[Any, ...]:
        rule, *bound = parts[of["rule"]]
        return *looseness(rule), -float(*bound or ["inf"])

    found = [of for of in drafted(name, draft)["rules"] if parts[of["rule"]][0] in rules]
    return described(FRONTIER, sorted(found, key=order))


def at_equal_loss(name: str, draft: str, options: str = GUARD) -> list[str]:
    """What each metric accepts at a loss, with the same further options."""
    found = drafted(name, draft)
    metrics = [metric for metric in METRICS if f"{metric}{options}" in found["curves"]]
    columns = {"nats per token": at("loss")}
    for metric in metrics:
        extra = at(f"extra_acceptance/{metric}{options}/value", ".1f", 100)
        columns[f"{METRICS[metric]}, %"] = extra
    for metric in metrics:
        if metric != "price":
            over = at(f"price_over/{metric}{options}", ".2f")
            columns[f"price / {METRICS[metric]}"] = over
    return described(columns, found["at_equal_loss"])


SIMULATED: Columns = {
    "rule": FRONTIER["rule"],
    "above strict, %: simulated": at("simulated/extra_acceptance", ".1f", 100),
    "online": FRONTIER["above strict, %"],
    "nats lost per token: simulated": at("simulated/cost", ".4f"),
    "lost online": FRONTIER["nats lost per token"],
}


@cache
def simulated_curves(calibrations: str) -> dict[str, dict[float, dict[str, float]]]:
    """What calibrations predict, without the guard, by metric and threshold.

    Args:
        calibrations: name of each metric's file, with `{}` in place of the metric.

    Returns:
        `cost` in nats per token, and `extra_acceptance`, the acceptance length over strict - 1.
    """
    found: dict[str, dict[float, dict[str, float]]] = {}
    for metric, name in METRICS.items():
        curve = raw(calibrations.format(metric))["curve"]
        strict = curve[-1]["acceptance_length"]
        found[name] = {
            of["threshold"]: {
                "cost": of["cost"],
                "extra_acceptance": of["acceptance_length"] / strict - 1,
            }
            for of in curve
        }
    return found


def simulated(calibrations: str, online: str, draft: str) -> list[str]:
    """What calibrations predict of rules without the guard, beside a comparison online."""
    items = []
    for of in drafted(online, draft)["rules"]:
        if of["rule"].endswith(NO_GUARD):
            name, value, _ = rule_name(of["rule"]).split()
            items.append({**of, "simulated": simulated_curves(calibrations)[name][float(value)]})
    return described(SIMULATED, sorted(items, key=lambda of: looseness(of["rule"])))


def simulated_at_equal_loss(
    calibrations: str, online: str, draft: str, losses: Iterable[float]
) -> list[str]:
    """What each metric is predicted to accept at a loss, and what the price gains over the ratio.

    Beside it, where it was measured, stands what the price gains without the guard online.
    """
    measured = {of["loss"]: of for of in drafted(online, draft)["at_equal_loss"]}
    items: list[dict[str, Any]] = []
    for loss in losses:
        gains = {}
        for name, curve in simulated_curves(calibrations).items():
            costs, extra = np.array(
                sorted((of["cost"], of["extra_acceptance"]) for of in curve.values())
            ).T
            gains[name] = float(np.interp(loss, costs, extra))
        over = {f"over {name}": gains["price"] / gains[name] for name in ("theta", "gap")}
        items.append({"loss": loss, **gains, **over, "online": measured.get(loss)})
    columns: Columns = {
        "nats per token": at("loss"),
        **{f"{name}, %": at(name, ".1f", 100) for name in METRICS.values()},
        "price / theta: simulated": at("over theta", ".2f"),
        "price / theta: online": at(f"online/price_over/ratio{NO_GUARD}", ".2f"),
        "price / gap: simulated": at("over gap", ".2f"),
    }
    return described(columns, items)
