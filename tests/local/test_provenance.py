"""What a result file says of the run that made it."""

import sys

from vllm_mars.local.provenance import describe_run


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
