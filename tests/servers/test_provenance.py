"""Description of a run in a result file."""

import sys
from pathlib import Path

from vllm_mars.servers.provenance import describe_run, hardware

CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
stepping\t: 1
bugs\t\t: a:b

processor\t: 1
model\t\t: 9
"""


def test_a_command_shows_no_directories_of_this_machine(monkeypatch):
    shown = {
        "/a/venv/bin/tool": "tool",
        "--output": "--output",
        "/tmp/x.json": "x.json",
        "--model=/models/tiny": "--model=tiny",
        "results/a.json": "results/a.json",
        '{"model": "/a/head-1.0", "k": 4}': '{"model": "head-1.0", "k": 4}',
    }
    unchanged = ["http://host:1/a/b.json", "../up.json", "a / b", "/"]
    monkeypatch.setattr(sys, "argv", [*shown, *unchanged])
    assert describe_run(None)["command"] == [*shown.values(), *unchanged]


def test_a_processor_is_described_by_its_numbers(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: CPUINFO)
    assert hardware(None)["cpu"] == "AMD EPYC, family 25, model 1, stepping 1"
