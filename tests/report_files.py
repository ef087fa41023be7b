"""Files of sweeps as the report reads them, with figures known by hand."""

import math

from vllm_mars.experiments.sweep.record_file import append_cell, append_quality
from vllm_mars.experiments.sweep.records import (
    Acceptance,
    Cell,
    CellKey,
    Estimate,
    OffChoice,
    Output,
    PromptQuality,
    Quality,
    Settings,
    Speed,
)

ANSWER = "The red fox <b>jumps</b> over\nthe lazy dog."
RULES = [
    ("autoregressive", None, 0, 20.0, 0.50),
    ("standard", None, 4, 36.0, 0.50),
    ("mars", 0.9, 4, 45.0, 0.56),
    ("mars", 0.98, 4, 40.0, 0.51),
    ("standard", None, 8, 38.0, 0.50),
    ("mars", 0.9, 8, 50.0, 0.57),
]
PROMPTS = ("a", "b", "c", "d")


def make_cell(method, theta, k, speed, concurrency, repeat):
    is_mars = method == "mars"
    key = CellKey(
        **{"model": "tiny", "draft": "ngram" if k else "none", "method": method},
        **{"metric": "ratio" if is_mars else None, "theta": theta, "gap": None},
        **{"protected": True if is_mars else None, "k": k, "temperature": 0.0},
        **{"concurrency": concurrency, "dataset": "prompts", "repeat": repeat},
    )
    seconds = 400 / (speed * math.sqrt(concurrency) * (1 + 0.01 * repeat))
    by_position = tuple(30 // (i + 1) for i in range(k))
    return Cell(
        key=key,
        status="ok",
        reason="",
        settings=Settings(64, {"prompts": 4}, 0, ()),
        theta_set_by="request" if is_mars else None,
        speed=Speed(seconds, 4, 0, 40, 400),
        acceptance=Acceptance(60, 60 * k, sum(by_position), by_position) if k else None,
        outputs=tuple(
            Output(name, ANSWER + name, 10, 100, "stop", seconds / 4, 0.1, 0.0) for name in PROMPTS
        ),
        created="2026-01-01T00:00:00+00:00",
        node="host",
        git_commit="0123456789abcdef0123",
        versions={"vllm": "0.32.0", "torch": "2.13.0"},
        hardware={"cpu": "x", "cores": 2, "memory_gib": 1.5, "gpu": None},
        command=("vllm-mars", "sweep", "--dataset", "my prompts.jsonl"),
    )


def make_quality(cell, nll, small_loss=None):
    off_choice = ()
    if cell.key.lossy and small_loss == cell.key.theta:
        # 0.05 nats in 10 tokens.
        off_choice = (OffChoice(1, 4, 7, "red", -1.05, "brown", -1.0),)
    elif cell.key.lossy:
        off_choice = (
            OffChoice(1, 4, 7, "red", math.log(0.25), 'brown & "<i>', math.log(0.5)),
            OffChoice(3, 15, 20, "jumps", math.log(0.3), "runs", math.log(0.4)),
        )
    scores = [
        {"nll": nll + 0.01 * i, "exact_match": float(i > 0), "chrf": 0.9, "seconds": 2.0}
        for i in range(len(PROMPTS))
    ]
    return Quality(
        prompts=tuple(
            PromptQuality(name, values, off_choice)
            for name, values in zip(PROMPTS, scores, strict=True)
        ),
        # The report pools the scores over repeats itself.
        estimates=(Estimate("nll", 4, nll, nll, nll),),
    )


def write_sweep(path, rules=RULES, concurrencies=(1, 4), judged=True, small_loss=None):
    cells = [
        (make_cell(method, theta, k, speed, concurrency, repeat), nll)
        for method, theta, k, speed, nll in rules
        for concurrency in concurrencies
        for repeat in range(2)
    ]
    for cell, _ in cells:
        append_cell(path, cell)
    if judged:
        for cell, nll in cells:
            append_quality(path, cell.key, make_quality(cell, nll, small_loss))
    return path
