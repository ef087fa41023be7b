"""What stands in for the real thing where only its life is the subject, not what it computes."""

from pathlib import Path

from vllm_mars.servers.server import VllmServer

VLLM_SERVE = Path(__file__).with_name("vllm_serve.py")


class StandInServer(VllmServer):
    """The server child with `vllm_serve.py` in the place of vLLM's command line."""

    def command(self) -> list[str]:
        python, flag, module, *arguments = super().command()
        assert (flag, module) == ("-m", "vllm_mars.cli.serve")
        return [python, str(VLLM_SERVE), *arguments]
