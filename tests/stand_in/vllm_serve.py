"""A fake `vllm serve` that starts in a tenth of a second and has no model.

    python vllm_serve.py serve MODEL --host HOST --port PORT [--load-seconds SECONDS] ...

As in vLLM, a missing model is named on standard error and the exit status is 1, an engine core
and a worker run in separate processes, `/health` answers once the model is loaded, and SIGTERM ends
all processes. The nightly tests use the real program in the same way.
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
    def do_GET(self) -> None:  # noqa: N802
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--load-seconds", type=float, default=0.1)
    args, _ = parser.parse_known_args()
    print("INFO: vLLM API server, a stand-in", flush=True)
    if not (args.model / "config.json").exists():
        raise OSError(f"Can't load the configuration of '{args.model}'.")
    engine_core = subprocess.Popen([sys.executable, "-c", ENGINE_CORE])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        time.sleep(args.load_seconds)
        print("INFO: Application startup complete.", flush=True)
        http.server.ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
    finally:
        engine_core.terminate()
        engine_core.wait()


if __name__ == "__main__":
    main()
