"""How much there is to read: prints each weight of the checkout, and fails above its limit."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LABORATORY = ("vllm_mars/experiments/", "vllm_mars/demo/", "benchmarks/")

# A change that needs more room makes it, by removing something else.
LIMITS = {
    "lines of product": None,
    "lines of laboratory": None,
    "lines of product and laboratory": 14_310,
    "lines of experiments and benchmarks": 3_890,
    "lines of tests": 13_680,
    "words of Markdown": 13_500,
    "words of README": 700,
    "kB of raw files": 1_500,
}


def weights() -> dict[str, int]:
    """Each weight of the files that git knows and the checkout has."""
    command = "git ls-files -z --cached --others --exclude-standard".split()
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    found = dict.fromkeys(LIMITS, 0)
    for name in set(filter(None, listed.split("\0"))):
        if not (path := ROOT / name).is_file():
            continue
        if name.endswith(".md"):
            words = len(path.read_text().split())
            found["words of Markdown"] += words
            found["words of README"] += words * (name == "README.md")
        elif name.startswith("benchmarks/results/"):
            found["kB of raw files"] += path.stat().st_size / 1000
        elif name.endswith(".py"):
            lines = path.read_text().count("\n")
            if name.startswith("tests/"):
                found["lines of tests"] += lines
                continue
            is_laboratory = name.startswith(LABORATORY)
            found["lines of " + ("laboratory" if is_laboratory else "product")] += lines
            found["lines of product and laboratory"] += lines
            if is_laboratory and not name.startswith("vllm_mars/demo/"):
                found["lines of experiments and benchmarks"] += lines
    return {name: round(weight) for name, weight in found.items()}


if __name__ == "__main__":
    found = weights()
    too_heavy = [name for name, limit in LIMITS.items() if limit and found[name] > limit]
    for name, limit in LIMITS.items():
        print(f"{found[name]:8,} {name}" + (f", at most {limit:,}" if limit else ""))
    if too_heavy:
        sys.exit(f"Above the limit in tests/weight.py: {', '.join(too_heavy)}.")
