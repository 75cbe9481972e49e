"""A server of the web in the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebServer(ThreadingHTTPServer):
    """Answers at a port of its own; the line is long: who finds it full asks again a second later.

    A reader asks for thirty names at once, and the usual line is one of five.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.base = f"http://127.0.0.1:{self.server_port}"

    def start(self) -> None:
        """Answer from now on; ``close`` is seen within a twentieth of a second."""
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of readers that were ended while they read."""

    def close(self) -> None:
        """Stop answering."""
        self.shutdown()
        self.server_close()


@contextmanager
def serving(handler: Callable[..., Any]) -> Iterator[str]:
    """Yield the address of a server that answers until the end."""
    server = WebServer(handler)
    server.start()
    yield server.base
    server.close()
