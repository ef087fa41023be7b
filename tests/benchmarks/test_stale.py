"""Stale figures: each file's commit against the last change of its dependencies."""

import json
import re
import subprocess

import pytest

from benchmarks import figures

# Arguments of `git log` for each dependency in index.json. The golden tokens of lossy steps change
# only with the rule; the constants are the defaults.
CHANGES = {
    "rule": [
        ["--", "tests/gpu/golden_tokens.json"],
        ["-GFIXED_PRICE, DRAWN_PRICE =|_DEFAULT_DRAFT_TEMPERATURE =", "--", "vllm_mars/*config.py"],
    ],
    "head": [["--", "vllm_mars/*/smollm2-135m-eagle3/model.safetensors"]],
    "kernels": [["--", "kernels", "vllm_mars/*/sampler_v2.py"]],
}
# Commits that only moved or renamed files.
MOVES = ("1e79f4e", "31c5bcd", "4d45322", "c9cabc3")
FILES = {path.stem: path for path in figures.RESULTS.glob("*.json") if path.stem != "index"}


def git(*arguments):
    run = subprocess.run(
        ["git", *arguments], cwd=figures.ROOT, capture_output=True, text=True, timeout=60
    )
    return run.stdout.strip() if run.returncode == 0 else None


@pytest.fixture(scope="module")
def history():
    if git("rev-parse", "--is-inside-work-tree") != "true":
        pytest.skip("a source distribution has no history")
    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("a shallow clone lacks the commits of the files")


def commits(name):
    """Returns the commits of a file's runs."""
    named = re.findall(r'"git_commit": ?"([0-9a-f]{40})', FILES[name].read_text())
    assert named, f"{name} names no commit"
    return {figures.landed(commit) for commit in named}


def changed(name, depends_on):
    """Returns a commit that changed a dependency of a file after its measurement, if any."""
    for commit in commits(name):
        assert git("merge-base", "--is-ancestor", commit, "HEAD") is not None, (
            f"{name}: {commit} is not in the history; measure again, or name the commit that landed"
        )
        for which in depends_on:
            for arguments in CHANGES[which]:
                log = git("log", "--format=%h %s", f"{commit}..HEAD", *arguments) or ""
                after = [line for line in log.splitlines() if not line.startswith(MOVES)]
                if after:
                    return f"{which}: {after[0]}"
    return None


def test_the_index_names_each_file():
    assert figures.index().keys() == FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_stale_file_is_marked(history, name):
    known = figures.index()[name]
    after = changed(name, known["of"])
    if "stale" in known:
        assert after, f"index.json: nothing that {name} depends on has changed; strike its `stale`"
    else:
        assert after is None, (
            f"{name} was measured before {after!r}: measure again, or say in index.json (`stale`) "
            "what has changed"
        )


def test_the_mark_is_below_each_table(monkeypatch):
    known = {"states": {"tells": "", "of": [], "stale": "Of last year."}}
    monkeypatch.setattr(figures, "index", lambda: known)
    *_, line = figures.lines("bounds", "", figures.RESULTS)
    assert line.endswith(". **Of last year.**")
    *_, line = figures.lines("controls", "", figures.RESULTS)
    assert line.endswith("model 167).")


def test_a_figure_before_a_change_is_found(history, tmp_path, monkeypatch):
    """A demo of the rule before 3575cce."""
    old = {"git_commit": "a192582c8634c4087a86459330e63e3e475a4208"}
    (path := tmp_path / "demo.json").write_text(json.dumps({"run": old}))
    monkeypatch.setitem(FILES, "demo", path)
    assert changed("demo", ["rule"]).startswith("rule: ")
    now = {"git_commit": git("rev-parse", "HEAD")}
    path.write_text(json.dumps({"run": now}))
    assert changed("demo", [*CHANGES]) is None
