"""Starts, answers, fails and ends as `vllm serve` does, in a tenth of a second and without vLLM.

    python vllm_serve.py serve MODEL --host HOST --port PORT [--load-seconds SECONDS] ...

As there: a model that does not exist is named on the standard error and ends it with status 1; an
engine core and a worker run in processes of their own; `/health` answers once the model is loaded;
SIGTERM ends all. The tests that take this program take the real one too, at night.
"""

import argparse
import http.server
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKER = "import time; time.sleep(300)"
ENGINE_CORE = f"""
import subprocess, sys
sys.exit(subprocess.Popen([sys.executable, "-c", {WORKER!r}]).wait())
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the server of a loaded model."""

    def do_GET(self) -> None:  # noqa: N802
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def main() -> None:
    """Runs until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--load-seconds", type=float, default=0.1)
    given, _ = parser.parse_known_args()
    print("INFO: vLLM API server, a stand-in", flush=True)
    if not (given.model / "config.json").exists():
        raise OSError(f"Can't load the configuration of '{given.model}'.")
    engine_core = subprocess.Popen([sys.executable, "-c", ENGINE_CORE])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        time.sleep(given.load_seconds)
        print("INFO: Application startup complete.", flush=True)
        http.server.ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()
    finally:
        engine_core.terminate()
        engine_core.wait()


if __name__ == "__main__":
    main()
