"""Fakes for tests of processes, in which no model is needed."""

from pathlib import Path

from vllm_mars.servers.server import VllmServer

VLLM_SERVE = Path(__file__).with_name("vllm_serve.py")


class StandInServer(VllmServer):
    """A server that runs `vllm_serve.py` instead of vLLM."""

    def command(self) -> list[str]:
        python, flag, module, *arguments = super().command()
        assert (flag, module) == ("-m", "vllm_mars.cli.serve")
        return [python, str(VLLM_SERVE), *arguments]
