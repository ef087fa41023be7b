"""Runs tests marked `interpreted` in a process of their file, whose Triton is the interpreter.

They are collected like others. Triton takes the interpreter for all of a process or for nothing,
by a variable that is read as it loads, and vLLM asks for its Triton kernels alike
(`interpreted/sitecustomize.py`). So the first of a file's tests starts such a process for all that
are selected, and each waits for its own result.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# In such a process, where its results go.
PIPE = "VLLM_MARS_TEST_RESULTS"
# An item's, to which pytest-xdist adds its group.
NAME = pytest.StashKey[str]()


class Interpreted:
    """The plugin of the process that collects."""

    def __init__(self) -> None:
        self._children: dict[Path, Child] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if item.get_closest_marker("interpreted"):
            item.stash[NAME] = item.nodeid
            # Fixtures are made where the test runs.
            item.setup = lambda: None
            item.runtest = lambda: self._run(item)

    def _run(self, item: pytest.Item) -> None:
        if item.path not in self._children:
            of_file = [it for it in item.session.items if it.path == item.path and NAME in it.stash]
            names = [it.stash[NAME] for it in of_file]
            self._children[item.path] = Child(item.config.rootpath, names)
        result = self._children[item.path].result(item.stash[NAME])
        print(result["shown"])
        if result["outcome"] == "skipped":
            pytest.skip(result["reason"])
        if result["outcome"] == "failed":
            pytest.fail(result["reason"], pytrace=False)

    def pytest_sessionfinish(self) -> None:
        for child in self._children.values():
            child.close()


class Child:
    """A process that runs tests of one file."""

    def __init__(self, root: Path, names: list[str]) -> None:
        reading, writing = os.pipe()
        self._lines, self._results, self._count = os.fdopen(reading), {}, len(names)
        self._output = tempfile.TemporaryFile("w+")
        folders = map(str, (TESTS / "interpreted", TESTS))
        variables = {"TRITON_INTERPRET": "1", PIPE: str(writing)}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names),
            ],
            cwd=root,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(folders)},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
        )
        os.close(writing)

    def result(self, name: str) -> dict[str, str]:
        """Waits for a test's end."""
        while name not in self._results:
            if not (line := self._lines.readline()):
                self._process.wait()
                self._output.seek(0)
                told = self._output.read()[-5000:]
                reason = f"its process ended with {self._process.returncode}:\n{told}"
                return {"outcome": "failed", "reason": reason, "shown": ""}
            found = json.loads(line)
            self._results[found["name"]] = found
        return self._results[name]

    def close(self) -> None:
        """Waits for the process, which is stopped if results were not waited for."""
        if len(self._results) < self._count:
            self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._lines.close()
        self._output.close()


class Results:
    """The plugin of the process that runs them."""

    def __init__(self, file: int) -> None:
        self._file = os.fdopen(file, "w", buffering=1)
        self._outcome: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._outcome = {"outcome": "passed", "reason": ""}
        if report.outcome != "passed" and self._outcome["outcome"] != "failed":
            self._outcome = {"outcome": report.outcome, "reason": report.longreprtext}
        if report.when == "teardown":
            shown = report.capstdout
            told = {"name": report.nodeid, **self._outcome, "shown": shown}
            self._file.write(json.dumps(told) + "\n")


def configure(config: pytest.Config) -> None:
    """Registers what this process needs of it."""
    if PIPE in os.environ:
        config.pluginmanager.register(Results(int(os.environ.pop(PIPE))))
    elif not IS_INTERPRETED:
        config.pluginmanager.register(Interpreted())
