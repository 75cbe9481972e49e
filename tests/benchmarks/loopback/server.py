"""An S3 server on loopback, with latency and shared bandwidth, and a log of requests."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from msgspec.structs import replace

from benchmarks.loopback.messages import Answer, Dropped, Request, make_error
from benchmarks.loopback.objects import ObjectStore

_SEND = 256 << 10
_ABSOLUTE = re.compile(r"http://[^/]*")
"""The prefix that AWS's C++ clients put before the path, as HTTP allows."""


class S3Server(ObjectStore):
    """The server. ``latency`` is in seconds per request, ``bandwidth`` in bytes per second."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Request] = []
        self.latency = 0.0
        self.bandwidth = 0.0
        self._free_at = 0.0
        self._http = _HttpServer(("127.0.0.1", 0), lambda *words: _Handler(self, *words))
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: Request, body: bytes) -> Answer:
        """Answer one request, after the latency; raises Dropped if there is no answer."""
        time.sleep(self.latency)
        return self.carry_out(request, body)

    def wait_for_line(self, nbytes: int) -> None:
        """Wait until the bandwidth allows so many bytes."""
        if not self.bandwidth:
            return
        with self.lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + nbytes / self.bandwidth
        time.sleep(max(0.0, self._free_at - time.monotonic()))


_BUCKET_OPERATIONS = {
    "PUT": (("", "CreateBucket"),),
    "HEAD": (("", "HeadBucket"),),
    "GET": (("uploads", "ListMultipartUploads"), ("", "ListObjectsV2")),
    "POST": (("delete", "DeleteObjects"),),
}
_OBJECT_OPERATIONS = {
    "PUT": (("uploadId", "UploadPart"), ("copy-source", "CopyObject"), ("", "PutObject")),
    "HEAD": (("", "HeadObject"),),
    "GET": (("uploadId", "ListParts"), ("", "GetObject")),
    "POST": (("uploads", "CreateMultipartUpload"), ("uploadId", "CompleteMultipartUpload")),
    "DELETE": (("uploadId", "AbortMultipartUpload"), ("", "DeleteObject")),
}
"""The operation of each method, by the first matching query name."""
_HEADERS = {
    "Authorization": "authorization",
    "User-Agent": "client",
    "X-Amz-Security-Token": "token",
    "If-Match": "if-match",
    "If-None-Match": "if-none-match",
    "x-amz-copy-source": "copy-source",
}


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: clients may close connections at any time."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def __init__(self, server: S3Server, *words: object) -> None:
        self._s3 = server
        super().__init__(*words)  # type: ignore[arg-type]

    def log_message(self, *words: object) -> None:
        """Write nothing: the server has its own log."""

    def handle_expect_100(self) -> bool:
        """Request the body at once: the client waits for that."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _serve(self) -> None:
        path, _, query = _ABSOLUTE.sub("", self.path).partition("?")
        bucket, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        for header, name in _HEADERS.items():
            if header in self.headers:
                asked[name] = self.headers[header]
        body = self._body()
        operations = (_OBJECT_OPERATIONS if key else _BUCKET_OPERATIONS).get(self.command, ())
        operation = next((called for name, called in operations if name in ("", *asked)), "")
        request = Request(operation, bucket, key, asked, self.headers["Range"], len(body))
        try:
            answer = self._s3.answer(request, body) if operation else make_error(501, "Unknown")
            sent = self._give(answer)
        except Dropped:
            self._s3.log.append(request)
            self._reset()
            return
        self._s3.log.append(replace(request, status=answer.status, sent=sent))
        self.wfile.flush()
        if answer.length not in (None, len(answer.body)):
            self._reset()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _body(self) -> bytes:
        if "chunked" in (self.headers["Transfer-Encoding"] or ""):
            return _join_chunks(self.rfile.readline, self.rfile.read)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self._s3.wait_for_line(len(body))
        return body

    def _give(self, answer: Answer) -> int:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != HTTPStatus.NO_CONTENT:
            length = len(answer.body) if answer.length is None else answer.length
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return 0
        for start in range(0, len(answer.body), _SEND):
            piece = answer.body[start : start + _SEND]
            self._s3.wait_for_line(len(piece))
            self.wfile.write(piece)
        return len(answer.body)

    def _reset(self) -> None:
        """Reset the connection, as if the machine were gone."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def _join_chunks(readline: Callable[[], bytes], read: Callable[[int], bytes]) -> bytes:
    """Return a body sent in chunks, each after its length."""
    chunks: list[bytes] = []
    while size := int(readline().partition(b";")[0], 16):
        chunks.append(read(size))
        readline()
    readline()
    return b"".join(chunks)
