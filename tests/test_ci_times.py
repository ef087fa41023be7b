"""The figures of the tests themselves, from a report that pytest wrote."""

import json
import subprocess
import sys

import pytest

from benchmarks import ci_times

TESTS = """
import pytest

@pytest.mark.parametrize("case", ["a.b", "c"])
def test_passes(case):
    pass

@pytest.mark.skip(reason="needs nothing")
def test_skipped():
    pass
"""


@pytest.fixture
def report(tmp_path):
    (tmp_path / "tests" / "room").mkdir(parents=True)
    (tmp_path / "tests" / "room" / "test_it.py").write_text(TESTS)
    skipped = "import pytest\npytest.skip('needs a GPU', allow_module_level=True)\n"
    (tmp_path / "tests" / "room" / "test_skipped.py").write_text(skipped)
    path = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", "--junitxml", str(path)]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    return path


def test_failures_are_named(report):
    text = report.read_text().replace('failures="0"', 'failures="1"')
    case = '<testcase classname="tests.room.test_it" name="test_it" time="1">'
    failed = f'{case}<failure message="" /></testcase></testsuite>'
    report.write_text(text.replace("</testsuite>", failed))
    found = ci_times.summary(report)
    assert (found["failures"], found["failed"]) == (1, ["tests.room.test_it::test_it"])


def test_outcomes(report):
    found = ci_times.summary(report)
    assert (found["tests"], found["skipped"], found["failures"]) == (4, 2, 0)
    assert found["failed"] == []
    assert found["wall_seconds"] > 0


def test_the_file_that_is_written(report, tmp_path, monkeypatch, capsys):
    output = tmp_path / "times.json"
    command = ["ci_times", "--day", str(report), "--night", str(report), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [*command, "--night-commit", "0123abc"])
    monkeypatch.setattr(ci_times, "vllm_device", lambda: ("cpu", None))
    assert ci_times.main() == 0
    written = json.loads(output.read_text())
    assert {"schema", "git_commit", "versions", "hardware", "day", "night"} <= written.keys()
    assert written["night"]["git_commit"] == "0123abc"
    monkeypatch.setattr(sys, "argv", [*command[:4], str(tmp_path / "none.xml"), *command[5:]])
    assert ci_times.main() == 0
    assert "night" not in json.loads(output.read_text())
    assert "none.xml is missing; the file has the day only" in capsys.readouterr().err
    report.unlink()
    assert ci_times.main() == 1
    assert "report.xml is missing; run its tests first" in capsys.readouterr().err
