"""The file that makes a running server stricter: when it is read and what requests then get."""

import json
import logging
import math
import os
from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from vllm_mars import MarsConfig
from vllm_mars.options import overrides
from vllm_mars.options.overrides import VARIABLE, Overrides
from vllm_mars.options.requests import options_of

THETA = MarsConfig(theta=0.9)
OPT_IN = MarsConfig(max_loss=0, limit=0.02)


@pytest.fixture(autouse=True)
def _clear_cache():
    # Tests may reuse paths.
    overrides._overrides.cache_clear()


@pytest.fixture
def clock(monkeypatch):
    """Advances a fake clock by one period per call."""
    now = [0.0]
    monkeypatch.setattr(overrides.time, "monotonic", lambda: now[0])

    def tick():
        now[0] += overrides.PERIOD

    return tick


def test_a_swapped_link_is_seen_within_a_second(tmp_path, clock):
    """Kubernetes keeps the link and replaces the directory that it points into."""
    for name, text in (("old", '{"mars_price": 0.1}'), ("new", '{"mars_max_loss": 0.01}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.json").write_text(text)
        os.utime(tmp_path / name / "file.json", (1, 1))
    (tmp_path / "..data").symlink_to("old")
    (tmp_path / "file.json").symlink_to("..data/file.json")
    reader = Overrides(str(tmp_path / "file.json"), MarsConfig(max_loss=0.02))
    seen = []
    reader.observe(seen.append)
    (tmp_path / "next").symlink_to("new")
    (tmp_path / "next").replace(tmp_path / "..data")
    assert reader.in_force() == {"mars_price": 0.1}
    clock()
    assert reader.in_force() == {"mars_max_loss": 0.01}
    assert seen == [{"mars_price": 0.1}, {"mars_max_loss": 0.01}]


def test_an_unreadable_file_is_logged_once(tmp_path, clock, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm")
    (file := tmp_path / "file.json").write_text('{"mars_price": 0}')
    reader = Overrides(str(file), MarsConfig(price=0.3))
    assert 'in force for new requests: {"mars_price": 0}' in caplog.text
    # None: the file is missing.
    for text in ("[" * 100_000, "[]", '{"mars_price": 1e39}', "\x00", None):
        file.write_text(text) if text is not None else file.unlink()
        caplog.clear()
        for _ in range(3):
            clock()
            assert reader.in_force() == {"mars_price": 0}
        # Unique objects, because a handler of another test may capture each record twice.
        messages = {id(record): record.getMessage() for record in caplog.records}.values()
        (line,) = (message for message in messages if "Until then" in message)
        assert line.endswith('Until then this stays in force: {"mars_price": 0}')
    file.write_text("{}")
    clock()
    assert reader.in_force() == {}
    # With the byte-order mark of Windows.
    file.write_text('{"mars_price": 0.1}', encoding="utf-8-sig")
    clock()
    assert reader.in_force() == {"mars_price": 0.1}


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        (THETA, None, "cannot be used: .*No such file.*. Write JSON there, such as"),
        (THETA, "{", "cannot be used: Expecting"),
        (THETA, "[0]", r"\[0\] is not an object with mars_theta or mars_max_loss. Write"),
        (THETA, '{"mars_theta": 0.8}', "mars_theta=0.8 is looser than this server's own 0.9"),
        (THETA, '{"mars_price": 0}', "mars_price is not an option of the overrides; did you"),
        (MarsConfig(max_loss=0.02), '{"mars_max_loss": 1}', "is above this server's bound of 0.02"),
        (OPT_IN, '{"mars_max_loss": 1}', "mars_max_loss=1 is above this server's limit of 0.02"),
        (MarsConfig(price=0.3), '{"mars_price": NaN}', r"mars_price=nan is outside \[0, 8192\]"),
    ],
)
def test_a_server_does_not_start_with_a_broken_file(tmp_path, monkeypatch, config, text, message):
    if text is not None:
        (tmp_path / "file.json").write_text(text)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file.json"))
    with pytest.raises(ValueError, match=f"VLLM_MARS_OVERRIDES=.*{message}"):
        overrides.read_at_start(None, config)
    monkeypatch.delenv(VARIABLE)
    overrides.read_at_start(None, config)


@pytest.mark.parametrize(
    ("config", "in_file", "requested", "value", "max_loss"),
    [
        (MarsConfig(price=0.3), {"mars_price": 0}, {"mars_price": 0.2}, 0, math.inf),
        (MarsConfig(price=0.3), {"mars_price": 0.2}, {"mars_price": 0.1}, 0.1, math.inf),
        # Between the server's default and its limit for requests.
        (OPT_IN, {"mars_max_loss": 0.01}, {"mars_max_loss": 0.02}, math.inf, 0.01),
        (OPT_IN, {"mars_max_loss": 0.01}, {}, 0, 0),
        (OPT_IN, {"mars_max_loss": 0}, {"mars_max_loss": 0.02}, 0, 0),
        (MarsConfig(theta=0.5), {"mars_theta": 0.9}, {"mars_theta": 0.6}, 0.9, math.inf),
        (MarsConfig(theta=0.5), {"mars_max_loss": 0}, {}, 1, 0),
        (MarsConfig(max_loss=0.02), {"mars_max_loss": 0.01}, {}, math.inf, 0.01),
        (MarsConfig(max_loss=0.02), {"mars_max_loss": 0.01}, {"mars_max_loss": 0}, 0, 0),
        (MarsConfig(max_loss=0.02), {"mars_price": 0.1}, {}, 0.1, 0.02),
    ],
)
def test_the_stricter_of_request_and_file_applies(
    tmp_path, monkeypatch, config, in_file, requested, value, max_loss
):
    (tmp_path / "file.json").write_text(json.dumps(in_file))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file.json"))
    for skip_clone in (False, True):
        # vLLM clones parameters that the caller may reuse.
        params = SamplingParams(extra_args=requested or None, skip_clone=skip_clone)
        options_of(params, config)
        request = SimpleNamespace(sampling_params=params.clone())
        overrides.override(request, config)
        options = options_of(request.sampling_params, config)
        assert (options.value, options.max_loss) == (value, max_loss)
        assert params.extra_args == (requested or None)
    # Requests to a pooling model have no sampling parameters.
    overrides.override(SimpleNamespace(sampling_params=None), config)
