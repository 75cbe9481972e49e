"""An S3 server on loopback whose answers can go wrong as a test chooses, with a log of requests.

It keeps buckets in memory, checks no signatures, and knows what clients of checkpoints ask for.
``S3Server.fail(fault, OPERATION, ...)`` adds a rule; operations have the names of S3's own API.
"""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from fnmatch import fnmatchcase
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.etree import ElementTree
from xml.sax.saxutils import escape

READS = ("GetObject", "HeadObject", "ListObjectsV2")
WRITES = (
    "PutObject",
    "CopyObject",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
)
REMOVALS = ("DeleteObject", "DeleteObjects", "AbortMultipartUpload")
_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_SEND = 64 << 10


@dataclass(frozen=True)
class Request:
    """One request; ``received`` and ``sent`` are bytes of its body and its answer's."""

    operation: str
    bucket: str
    key: str
    query: dict[str, str]
    range: str | None
    received: int
    sent: int = 0
    status: int = 0
    """0 where no answer was given."""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]


@dataclass
class Answer:
    """What is answered; ``length`` is what is said of the body's length where that is a lie."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


@dataclass(frozen=True)
class StoredObject:
    """A whole object."""

    data: bytes
    etag: str
    modified: float = field(default_factory=time.time)


@dataclass
class PartialUpload:
    """A multipart upload that is neither completed nor aborted."""

    bucket: str
    key: str
    parts: dict[int, bytes] = field(default_factory=dict)


class Dropped(Exception):
    """The connection ends without an answer."""


Fault = Callable[[Request, Callable[[Request], Answer]], Answer]
"""Answers a request; the second argument answers as the server would, which carries it out."""


def refuse(status: int, code: str, retry_after: int | None = None) -> Fault:
    """An error as S3 says it; nothing is carried out."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def fault(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
        return _error(status, code, headers)

    return fault


DENIED = refuse(403, "AccessDenied")
EXPIRED = refuse(400, "ExpiredToken")
SKEWED = refuse(403, "RequestTimeTooSkewed")
SLOW_DOWN = refuse(503, "SlowDown")
INTERNAL = refuse(500, "InternalError")


def reset(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """The connection is reset; nothing is carried out."""
    raise Dropped


def lost(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """The request is carried out, and its answer never arrives."""
    carry_out(request)
    raise Dropped


def stall(release: threading.Event) -> Fault:
    """Nothing is answered until the event is set."""

    def fault(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
        release.wait(60)
        raise Dropped

    return fault


def whole(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """The whole object, as of a proxy that does not know ranges."""
    return carry_out(_with_range(request, None))


def shifted(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """The bytes that begin one later, as the answer says."""
    first, last = _span(request)
    return carry_out(_with_range(request, f"bytes={first + 1}-{last}"))


def shifted_unsaid(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """Bytes of which nobody says where they lie."""
    answer = carry_out(request)
    answer.headers.pop("Content-Range", None)
    return answer


def fewer(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """Fewer bytes than were asked for, as if that were all."""
    answer = carry_out(request)
    answer.body = answer.body[:3]
    return answer


def cut(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """Half of what was promised; then the connection is gone."""
    answer = carry_out(request)
    answer.length, answer.body = len(answer.body), answer.body[: len(answer.body) // 2]
    return answer


def call(function: Callable[[Request], object]) -> Fault:
    """Something happens before the server answers as always."""

    def fault(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
        function(request)
        return carry_out(request)

    return fault


@dataclass
class Rule:
    """Which requests a fault answers: those chosen, from the ``start``-th on, ``times`` of them."""

    fault: Fault
    operations: tuple[str, ...]
    key: str = "*"
    times: int = 1 << 30
    start: int = 1
    every: int = 1
    where: Callable[[Request], bool] = lambda request: True
    seen: int = 0
    """Requests that were chosen so far."""

    def matches(self, request: Request) -> bool:
        """Count a request that is chosen, and return whether its answer is the fault's."""
        if self.operations and request.operation not in self.operations:
            return False
        if not fnmatchcase(request.key, self.key) or not self.where(request):
            return False
        self.seen += 1
        number = self.seen - self.start
        return number >= 0 and number % self.every == 0 and number // self.every < self.times


class S3Server:
    """The server. ``latency`` is in seconds a request, ``bandwidth`` in bytes a second of all."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, StoredObject]] = {}
        self.partial: dict[str, PartialUpload] = {}
        self.log: list[Request] = []
        self.latency = 0.0
        self.bandwidth = 0.0
        self._rules: list[Rule] = []
        self._lock = threading.RLock()
        self._free_at = 0.0
        self._http = _HttpServer(("127.0.0.1", 0), lambda *words: _Handler(self, *words))
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._http.shutdown()
        self._http.server_close()

    def fail(self, fault: Fault, *operations: str, **chosen: object) -> Rule:
        """Let a fault answer requests of these operations, of all where none is named.

        ``key`` is a pattern, ``where`` a predicate; of the requests so chosen the ``start``-th, and
        each ``every``-th from there on, is answered so, ``times`` of them.
        """
        rule = Rule(fault, operations, **chosen)  # type: ignore[arg-type]
        with self._lock:
            self._rules.insert(0, rule)
        return rule

    def heal(self) -> None:
        """Answer as a server should."""
        with self._lock:
            self._rules.clear()

    def answer(self, request: Request, body: bytes) -> Answer:
        """Answer one request, or let a fault do so; the first that matches."""
        with self._lock:
            rules = [rule for rule in self._rules if rule.matches(request)]
        time.sleep(self.latency)

        def carry_out(request: Request) -> Answer:
            with self._lock:
                return getattr(self, _METHODS[request.operation])(request, body)

        return rules[0].fault(request, carry_out) if rules else carry_out(request)

    def paced(self, nbytes: int) -> None:
        """Wait until the line has room for so many bytes."""
        if not self.bandwidth:
            return
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + nbytes / self.bandwidth
        time.sleep(max(0.0, self._free_at - time.monotonic()))

    def put(self, bucket: str, key: str, data: bytes, etag: str | None = None) -> StoredObject:
        """Store an object, without a request."""
        stored = StoredObject(data, etag or f'"{hashlib.md5(data).hexdigest()}"')
        with self._lock:
            self.buckets.setdefault(bucket, {})[key] = stored
        return stored

    # Buckets

    def _create_bucket(self, request: Request, body: bytes) -> Answer:
        self.buckets.setdefault(request.bucket, {})
        return Answer()

    def _head_bucket(self, request: Request, body: bytes) -> Answer:
        return Answer() if request.bucket in self.buckets else _error(404, "NoSuchBucket")

    def _list(self, request: Request, body: bytes) -> Answer:
        """Answer ListObjectsV2: one page, with common prefixes where a delimiter is given."""
        if request.bucket not in self.buckets:
            return _error(404, "NoSuchBucket")
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        entries: dict[str, str] = {}
        for key, stored in sorted(self.buckets[request.bucket].items()):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                key = prefix + rest.partition(delimiter)[0] + delimiter
                entry = f"<CommonPrefixes><Prefix>{_text(key, query)}</Prefix></CommonPrefixes>"
            else:
                entry = f"<Contents><Key>{_text(key, query)}</Key>{_described(stored)}</Contents>"
            if key > after:
                entries[key] = entry
        page = list(entries.items())[: int(query.get("max-keys", 1000))]
        more = len(page) < len(entries)
        head = f"<Name>{request.bucket}</Name><Prefix>{_text(prefix, query)}</Prefix>"
        head += f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
        if "encoding-type" in query:
            head += "<EncodingType>url</EncodingType>"
        if more:
            head += f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"
        return _xml("ListBucketResult", head + "".join(entry for _, entry in page))

    def _list_uploads(self, request: Request, body: bytes) -> Answer:
        prefix = request.query.get("prefix", "")
        entries = [
            f"<Upload><Key>{escape(one.key)}</Key><UploadId>{number}</UploadId></Upload>"
            for number, one in self.partial.items()
            if one.bucket == request.bucket and one.key.startswith(prefix)
        ]
        head = f"<Bucket>{request.bucket}</Bucket><IsTruncated>false</IsTruncated>"
        return _xml("ListMultipartUploadsResult", head + "".join(entries))

    def _delete_many(self, request: Request, body: bytes) -> Answer:
        keys = [
            node.text or "" for node in ElementTree.fromstring(body).iter() if _tag(node, "Key")
        ]
        for key in keys:
            self.buckets[request.bucket].pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return _xml("DeleteResult", deleted)

    # Objects

    def _get(self, request: Request, body: bytes) -> Answer:
        stored = self.buckets.get(request.bucket, {}).get(request.key)
        if stored is None:
            return _error(404, "NoSuchKey" if request.bucket in self.buckets else "NoSuchBucket")
        headers = {
            "ETag": stored.etag,
            "Last-Modified": formatdate(stored.modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if request.query.get("if-match", stored.etag) != stored.etag:
            return _error(412, "PreconditionFailed")
        if request.range is None:
            return Answer(200, stored.data, headers)
        first, last = _span(request, len(stored.data))
        if first >= len(stored.data):
            return _error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(stored.data)}"
        return Answer(206, stored.data[first : last + 1], headers)

    def _put(self, request: Request, body: bytes) -> Answer:
        if request.bucket not in self.buckets:
            return _error(404, "NoSuchBucket")
        there = self.buckets[request.bucket].get(request.key)
        if "if-none-match" in request.query and there is not None:
            return _error(412, "PreconditionFailed")
        if "if-match" in request.query and (
            there is None or request.query["if-match"] != there.etag
        ):
            return _error(412, "PreconditionFailed")
        return Answer(headers={"ETag": self.put(request.bucket, request.key, body).etag})

    def _copy(self, request: Request, body: bytes) -> Answer:
        bucket, _, key = request.query["copy-source"].lstrip("/").partition("/")
        stored = self.buckets.get(bucket, {}).get(key)
        if stored is None:
            return _error(404, "NoSuchKey")
        return _xml(
            "CopyObjectResult", _described(self.put(request.bucket, request.key, stored.data))
        )

    def _delete(self, request: Request, body: bytes) -> Answer:
        self.buckets.get(request.bucket, {}).pop(request.key, None)
        return Answer(204)

    # Uploads in parts

    def _create_upload(self, request: Request, body: bytes) -> Answer:
        if request.bucket not in self.buckets:
            return _error(404, "NoSuchBucket")
        number = uuid.uuid4().hex
        self.partial[number] = PartialUpload(request.bucket, request.key)
        head = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
        return _xml("InitiateMultipartUploadResult", f"{head}<UploadId>{number}</UploadId>")

    def _put_part(self, request: Request, body: bytes) -> Answer:
        upload = self.partial.get(request.query["uploadId"])
        if upload is None:
            return _error(404, "NoSuchUpload")
        upload.parts[int(request.query["partNumber"])] = body
        return Answer(headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _complete(self, request: Request, body: bytes) -> Answer:
        upload = self.partial.get(request.query["uploadId"])
        if upload is None:
            return _error(404, "NoSuchUpload")
        nodes = [node for node in ElementTree.fromstring(body).iter() if _tag(node, "PartNumber")]
        numbers = [int(node.text or 0) for node in nodes]
        if not numbers or sorted(set(numbers)) != numbers or not set(numbers) <= set(upload.parts):
            return _error(400, "InvalidPart")
        del self.partial[request.query["uploadId"]]
        parts = [upload.parts[number] for number in numbers]
        digests = b"".join(hashlib.md5(part).digest() for part in parts)
        etag = f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'
        self.put(request.bucket, request.key, b"".join(parts), etag)
        head = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
        return _xml("CompleteMultipartUploadResult", f"{head}<ETag>{escape(etag)}</ETag>")

    def _abort(self, request: Request, body: bytes) -> Answer:
        there = self.partial.pop(request.query["uploadId"], None)
        return Answer(204) if there is not None else _error(404, "NoSuchUpload")

    def _list_parts(self, request: Request, body: bytes) -> Answer:
        upload = self.partial.get(request.query["uploadId"])
        if upload is None:
            return _error(404, "NoSuchUpload")
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><Size>{len(data)}</Size></Part>"
            for number, data in sorted(upload.parts.items())
        )
        return _xml("ListPartsResult", f"<IsTruncated>false</IsTruncated>{parts}")


_METHODS = {
    "CreateBucket": "_create_bucket",
    "HeadBucket": "_head_bucket",
    "ListObjectsV2": "_list",
    "ListMultipartUploads": "_list_uploads",
    "DeleteObjects": "_delete_many",
    "GetObject": "_get",
    "HeadObject": "_get",
    "PutObject": "_put",
    "CopyObject": "_copy",
    "DeleteObject": "_delete",
    "CreateMultipartUpload": "_create_upload",
    "UploadPart": "_put_part",
    "CompleteMultipartUpload": "_complete",
    "AbortMultipartUpload": "_abort",
    "ListParts": "_list_parts",
}
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
"""What a method asks for, by the first of the query's names that is there."""


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients close connections when they like."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def __init__(self, server: S3Server, *words: object) -> None:
        self.s3 = server
        super().__init__(*words)  # type: ignore[arg-type]

    def log_message(self, *words: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        """Ask for the body at once: the client waits for that."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _serve(self) -> None:
        path, _, query = self.path.partition("?")
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
            answer = self.s3.answer(request, body) if operation else _error(501, "NotImplemented")
            sent = self._give(answer)
        except Dropped:
            self.s3.log.append(request)
            self._reset()
            return
        self.s3.log.append(_answered(request, answer.status, sent))
        self.wfile.flush()
        if answer.length not in (None, len(answer.body)):
            self._reset()

    def _body(self) -> bytes:
        if "chunked" in (self.headers["Transfer-Encoding"] or ""):
            return _unchunked(self.rfile.readline, self.rfile.read)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.s3.paced(len(body))
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
            self.s3.paced(len(piece))
            self.wfile.write(piece)
        return len(answer.body)

    def _reset(self) -> None:
        """End the connection at once, as a machine that is gone does."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


for _method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler._serve)

_HEADERS = {
    "Authorization": "authorization",
    "User-Agent": "client",
    "X-Amz-Security-Token": "token",
    "If-Match": "if-match",
    "If-None-Match": "if-none-match",
    "x-amz-copy-source": "copy-source",
}


def _unchunked(readline: Callable[[], bytes], read: Callable[[int], bytes]) -> bytes:
    """Return a body that comes in chunks, each after its length."""
    chunks: list[bytes] = []
    while size := int(readline().partition(b";")[0], 16):
        chunks.append(read(size))
        readline()
    readline()
    return b"".join(chunks)


def _answered(request: Request, status: int, sent: int) -> Request:
    return Request(**{**vars(request), "status": status, "sent": sent})


def _with_range(request: Request, range_: str | None) -> Request:
    return Request(**{**vars(request), "range": range_})


def _span(request: Request, size: int | None = None) -> tuple[int, int]:
    """Return the first and the last byte that are asked for."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.range or "")
    if match is None:
        raise ValueError(request.range)
    if not match[1]:
        return max(0, (size or 0) - int(match[2])), (size or 0) - 1
    last = int(match[2]) if match[2] else (size or 0) - 1
    return int(match[1]), last if size is None else min(last, size - 1)


def _error(status: int, code: str, headers: dict[str, str] | None = None) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return Answer(status, body, {"Content-Type": "application/xml", **(headers or {})})


def _xml(root: str, inside: str) -> Answer:
    xmlns = "http://s3.amazonaws.com/doc/2006-03-01/"
    body = f'{_XML}<{root} xmlns="{xmlns}">{inside}</{root}>'.encode()
    return Answer(200, body, {"Content-Type": "application/xml"})


def _described(stored: StoredObject) -> str:
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
    etag, size = escape(stored.etag, {'"': "&quot;"}), len(stored.data)
    return f"<LastModified>{modified}</LastModified><ETag>{etag}</ETag><Size>{size}</Size>"


def _text(key: str, query: dict[str, str]) -> str:
    """Return a key as an answer shows it, URL-encoded where that is asked for."""
    return urllib.parse.quote(key) if "encoding-type" in query else escape(key)


def _tag(node: ElementTree.Element, name: str) -> bool:
    return node.tag.rpartition("}")[2] == name


def names_of(requests: Iterable[Request]) -> list[str]:
    """The last parts of the keys of requests, in order."""
    return [one.name for one in requests]
