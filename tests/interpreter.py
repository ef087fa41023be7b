"""Runs the tests marked `interpreted` in one process per file, with Triton's interpreter.

Triton reads TRITON_INTERPRET when it loads, so the interpreter applies to a whole process; vLLM's
Triton kernels likewise need `interpreted/sitecustomize.py`. The first test of a file starts the
process for all selected tests of the file, and each test waits for its result.
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
# File descriptor to which an interpreted process writes results.
PIPE = "VLLM_MARS_TEST_RESULTS"
# Node id of an item before pytest-xdist appends the group.
NAME = pytest.StashKey[str]()


class Interpreted:
    """Plugin of the collecting process."""

    def __init__(self) -> None:
        self._children: dict[Path, Child] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if item.get_closest_marker("interpreted"):
            item.stash[NAME] = item.nodeid
            # The child process sets up the fixtures.
            item.setup = lambda: None
            item.runtest = lambda: self._run(item)

    def _run(self, item: pytest.Item) -> None:
        if item.path not in self._children:
            names = [
                other.stash[NAME]
                for other in item.session.items
                if other.path == item.path and NAME in other.stash
            ]
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
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names],
            cwd=root,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(folders)},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
        )
        os.close(writing)

    def result(self, name: str) -> dict[str, str]:
        """Waits for the result of a test."""
        while name not in self._results:
            if not (line := self._lines.readline()):
                self._process.wait()
                self._output.seek(0)
                output = self._output.read()[-5000:]
                reason = f"its process ended with {self._process.returncode}:\n{output}"
                return {"outcome": "failed", "reason": reason, "shown": ""}
            result = json.loads(line)
            self._results[result["name"]] = result
        return self._results[name]

    def close(self) -> None:
        """Stops the process if tests are left, and waits for its end."""
        if len(self._results) < self._count:
            self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._lines.close()
        self._output.close()


class Results:
    """Plugin of the process that runs the tests."""

    def __init__(self, file: int) -> None:
        self._file = os.fdopen(file, "w", buffering=1)
        self._outcome: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._outcome = {"outcome": "passed", "reason": ""}
        if report.outcome != "passed" and self._outcome["outcome"] != "failed":
            self._outcome = {"outcome": report.outcome, "reason": report.longreprtext}
        if report.when == "teardown":
            result = {"name": report.nodeid, **self._outcome, "shown": report.capstdout}
            self._file.write(json.dumps(result) + "\n")


def configure(config: pytest.Config) -> None:
    """Registers the plugin of this process."""
    if PIPE in os.environ:
        config.pluginmanager.register(Results(int(os.environ.pop(PIPE))))
    elif not IS_INTERPRETED:
        config.pluginmanager.register(Interpreted())
