"""What a result file says of the run that made it."""

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


def test_a_command_holds_no_directories_of_this_machine(monkeypatch):
    command = [
        *("/a/venv/bin/tool", "--output", "/tmp/x.json", "--model=/models/tiny", "results/a.json"),
        *('{"model": "/a/head-1.0", "k": 4}', "http://host:1/a/b.json", "../up.json", "a / b", "/"),
    ]
    monkeypatch.setattr(sys, "argv", command)
    assert describe_run(None)["command"] == [
        *("tool", "--output", "x.json", "--model=tiny", "results/a.json"),
        *('{"model": "head-1.0", "k": 4}', "http://host:1/a/b.json", "../up.json", "a / b", "/"),
    ]


def test_a_processor_is_told_by_its_numbers(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: CPUINFO)
    assert hardware(None)["cpu"] == "AMD EPYC, family 25, model 1, stepping 1"
