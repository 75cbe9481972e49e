"""The objects of an S3 server, and its answers about them."""

from __future__ import annotations

import hashlib
import threading
import time
import urllib.parse
import uuid
from email.utils import formatdate
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from msgspec import Struct, field

from benchmarks.loopback.messages import (
    Answer,
    Request,
    make_document,
    make_error,
)


class StoredObject(Struct, frozen=True):
    """A whole object."""

    data: bytes
    etag: str
    modified: float = field(default_factory=time.time)


class PartialUpload(Struct):
    """A multipart upload that is neither completed nor aborted."""

    bucket: str
    key: str
    parts: dict[int, bytes] = field(default_factory=dict)


class ObjectStore:
    """Buckets of objects in memory, and multipart uploads by their numbers."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, StoredObject]] = {}
        self.partial: dict[str, PartialUpload] = {}
        self.lock = threading.RLock()
        self.page = 1000
        """Entries per page of a listing."""

    def carry_out(self, request: Request, body: bytes) -> Answer:
        """Execute a request, and return the answer."""
        with self.lock:
            answer: Answer = getattr(self, _METHODS[request.operation])(request, body)
            return answer

    def put(self, bucket: str, key: str, data: bytes, etag: str | None = None) -> StoredObject:
        """Store an object, without a request."""
        stored = StoredObject(data, etag or f'"{hashlib.md5(data).hexdigest()}"')
        with self.lock:
            self.buckets.setdefault(bucket, {})[key] = stored
        return stored

    # Buckets

    def _create_bucket(self, request: Request, body: bytes) -> Answer:
        self.buckets.setdefault(request.bucket, {})
        return Answer()

    def _head_bucket(self, request: Request, body: bytes) -> Answer:
        return Answer() if request.bucket in self.buckets else make_error(404, "NoSuchBucket")

    def _list(self, request: Request, body: bytes) -> Answer:
        """Answer ListObjectsV2: one page, with common prefixes where a delimiter is given."""
        if request.bucket not in self.buckets:
            return make_error(404, "NoSuchBucket")
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
        page = list(entries.items())[: int(query.get("max-keys", self.page))]
        more = len(page) < len(entries)
        head = f"<Name>{request.bucket}</Name><Prefix>{_text(prefix, query)}</Prefix>"
        head += f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
        if "encoding-type" in query:
            head += "<EncodingType>url</EncodingType>"
        if more:
            head += f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"
        return make_document("ListBucketResult", head + "".join(entry for _, entry in page))

    def _list_uploads(self, request: Request, body: bytes) -> Answer:
        """Answer ListMultipartUploads: one page."""
        query = request.query
        prefix = query.get("prefix", "")
        after = query.get("key-marker", ""), query.get("upload-id-marker", "\uffff")
        there = sorted(
            (one.key, number)
            for number, one in self.partial.items()
            if one.bucket == request.bucket and one.key.startswith(prefix)
        )
        entries = [one for one in there if one > after]
        page = entries[: int(query.get("max-uploads", self.page))]
        more = len(page) < len(entries)
        head = f"<Bucket>{request.bucket}</Bucket><IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            key, number = page[-1]
            head += f"<NextKeyMarker>{escape(key)}</NextKeyMarker>"
            head += f"<NextUploadIdMarker>{number}</NextUploadIdMarker>"
        uploads = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{number}</UploadId></Upload>"
            for key, number in page
        )
        return make_document("ListMultipartUploadsResult", head + uploads)

    def _delete_many(self, request: Request, body: bytes) -> Answer:
        keys = [
            node.text or "" for node in ElementTree.fromstring(body).iter() if _tag(node, "Key")
        ]
        for key in keys:
            self.buckets[request.bucket].pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return make_document("DeleteResult", deleted)

    # Objects

    def _get(self, request: Request, body: bytes) -> Answer:
        stored = self.buckets.get(request.bucket, {}).get(request.key)
        if stored is None:
            return make_error(
                404, "NoSuchKey" if request.bucket in self.buckets else "NoSuchBucket"
            )
        headers = {
            "ETag": stored.etag,
            "Last-Modified": formatdate(stored.modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if request.query.get("if-match", stored.etag) != stored.etag:
            return make_error(412, "PreconditionFailed")
        if request.range is None:
            return Answer(200, stored.data, headers)
        first, last = request.span(len(stored.data))
        if first >= len(stored.data):
            return make_error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(stored.data)}"
        return Answer(206, memoryview(stored.data)[first : last + 1], headers)

    def _put(self, request: Request, body: bytes) -> Answer:
        if request.bucket not in self.buckets:
            return make_error(404, "NoSuchBucket")
        there = self.buckets[request.bucket].get(request.key)
        if "if-none-match" in request.query and there is not None:
            return make_error(412, "PreconditionFailed")
        if "if-match" in request.query and (
            there is None or request.query["if-match"] != there.etag
        ):
            return make_error(412, "PreconditionFailed")
        return Answer(headers={"ETag": self.put(request.bucket, request.key, body).etag})

    def _copy(self, request: Request, body: bytes) -> Answer:
        bucket, _, key = request.query["copy-source"].lstrip("/").partition("/")
        stored = self.buckets.get(bucket, {}).get(key)
        if stored is None:
            return make_error(404, "NoSuchKey")
        return make_document(
            "CopyObjectResult", _described(self.put(request.bucket, request.key, stored.data))
        )

    def _delete(self, request: Request, body: bytes) -> Answer:
        self.buckets.get(request.bucket, {}).pop(request.key, None)
        return Answer(204)

    # Uploads in parts

    def _create_upload(self, request: Request, body: bytes) -> Answer:
        if request.bucket not in self.buckets:
            return make_error(404, "NoSuchBucket")
        number = uuid.uuid4().hex
        self.partial[number] = PartialUpload(request.bucket, request.key)
        head = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
        return make_document(
            "InitiateMultipartUploadResult", f"{head}<UploadId>{number}</UploadId>"
        )

    def _put_part(self, request: Request, body: bytes) -> Answer:
        upload = self.partial.get(request.query["uploadId"])
        if upload is None:
            return make_error(404, "NoSuchUpload")
        upload.parts[int(request.query["partNumber"])] = body
        return Answer(headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _complete(self, request: Request, body: bytes) -> Answer:
        upload = self.partial.get(request.query["uploadId"])
        if upload is None:
            return make_error(404, "NoSuchUpload")
        nodes = [node for node in ElementTree.fromstring(body).iter() if _tag(node, "PartNumber")]
        numbers = [int(node.text or 0) for node in nodes]
        if not numbers or sorted(set(numbers)) != numbers or not set(numbers) <= set(upload.parts):
            return make_error(400, "InvalidPart")
        del self.partial[request.query["uploadId"]]
        parts = [upload.parts[number] for number in numbers]
        digests = b"".join(hashlib.md5(part).digest() for part in parts)
        etag = f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'
        self.put(request.bucket, request.key, b"".join(parts), etag)
        head = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
        return make_document("CompleteMultipartUploadResult", f"{head}<ETag>{escape(etag)}</ETag>")

    def _abort(self, request: Request, body: bytes) -> Answer:
        there = self.partial.pop(request.query["uploadId"], None)
        return Answer(204) if there is not None else make_error(404, "NoSuchUpload")

    def _list_parts(self, request: Request, body: bytes) -> Answer:
        upload = self.partial.get(request.query["uploadId"])
        if upload is None:
            return make_error(404, "NoSuchUpload")
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><Size>{len(data)}</Size></Part>"
            for number, data in sorted(upload.parts.items())
        )
        return make_document("ListPartsResult", f"<IsTruncated>false</IsTruncated>{parts}")


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


def _described(stored: StoredObject) -> str:
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
    etag, size = escape(stored.etag, {'"': "&quot;"}), len(stored.data)
    return f"<LastModified>{modified}</LastModified><ETag>{etag}</ETag><Size>{size}</Size>"


def _text(key: str, query: dict[str, str]) -> str:
    """Return a key for an answer, URL-encoded if requested."""
    return urllib.parse.quote(key) if "encoding-type" in query else escape(key)


def _tag(node: ElementTree.Element, name: str) -> bool:
    return node.tag.rpartition("}")[2] == name
