"""A fake HTTP server in a thread of the test."""

import contextlib
import http.server
import threading
from collections.abc import Iterator


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with a text and writes no log."""

    def answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        """Writes nothing."""


@contextlib.contextmanager
def answering(handler: type[Handler]) -> Iterator[str]:
    """Runs a server of this handler; yields its address, "host:port"."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
