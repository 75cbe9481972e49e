"""The file of a manifest: what a checkpoint holds, so that any copy can be compared with it.

JSON, schema ``ckptool.manifest/1``:

- ``tensors``: for each name its ``dtype`` (torch's name), global ``shape``, and the ``sha256`` of
  its elements in row-major order, little-endian, without padding: the bytes that
  ``tensor.contiguous()`` has in memory, that a safetensors file holds for it, and that do not
  depend on how it is sharded;
- ``values``: for each value that is no tensor the ``sha256`` of its canonical JSON (``values.py``
  says what that is), and where it is short that JSON itself, as text;
- ``unproved``: what is in the checkpoint and in no digest of a tensor or value, and why;
- ``files``: for each file its size in bytes (``nbytes``) and ``sha256``. They are of the files that
  the manifest was made of; of a copy in other files, tensors and values are compared;
- ``sha256``: of all the rest, as canonical JSON.

With standard tools: a file by ``sha256sum FILE``; a tensor of a safetensors file, whose header
gives its ``data_offsets`` B and E behind N + 8 bytes, by
``tail -c +$((N + 8 + B + 1)) FILE | head -c $((E - B)) | sha256sum``; the manifest itself by
``jq -acjS 'del(.sha256)' MANIFEST | sha256sum``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, to_builtins

from ckptool.commands.verify.compare.values import canonical_text, text_digest
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Damaged, NotFound, Unsupported
from ckptool.storage.disk import nearest_folder, read_at_most, require_marked
from ckptool.storage.place import by_place, on_disk, write_file
from ckptool.storage.url import Location, RemotePath

SCHEMA = "ckptool.manifest/1"
MARK = b'{\n"schema": "ckptool.manifest/'
"""The beginning of every manifest."""
_LARGEST = 1 << 30
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Natural = Annotated[int, Meta(ge=0)]


class TensorProof(Struct, frozen=True):
    """A tensor's element type, global shape and SHA-256 of its row-major bytes."""

    dtype: str
    shape: tuple[Natural, ...]
    sha256: Digest

    def __post_init__(self) -> None:
        if self.dtype not in BY_NAME:
            raise ValueError(f"{self.dtype[:80]!r} is not an element type")


class ValueProof(Struct, frozen=True):
    """The SHA-256 of a value's canonical JSON, and that JSON where it is short."""

    sha256: Digest
    json: str | None

    def __post_init__(self) -> None:
        if self.json is not None and text_digest(self.json) != self.sha256:
            raise ValueError("a value does not match its SHA-256")


class FileProof(Struct, frozen=True):
    """A file's size in bytes and SHA-256."""

    nbytes: Natural
    sha256: Digest


class CheckpointManifest(Struct, frozen=True):
    """What a checkpoint of ``format`` contains. ``unproved``: names without a digest, and why."""

    format: str
    tensors: dict[str, TensorProof]
    values: dict[str, ValueProof]
    unproved: dict[str, str]
    files: dict[str, FileProof]


def manifest_text(manifest: CheckpointManifest) -> str:
    """Return the text of a manifest: JSON, one line per entry, its own digest at the end."""
    content = {"schema": SCHEMA} | to_builtins(manifest)
    content["sha256"] = text_digest(canonical_text(content))
    return "{\n" + ",\n".join(_lines(content)) + "\n}\n"


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    for key, value in content.items():
        if not isinstance(value, dict) or not value:
            yield f"{json.dumps(key)}: {json.dumps(value)}"
            continue
        entries = (f"  {json.dumps(name)}: {json.dumps(value[name])}" for name in sorted(value))
        yield f"{json.dumps(key)}: {{\n" + ",\n".join(entries) + "\n}"


def write_manifest(manifest: CheckpointManifest, path: Location, *, overwrite: bool) -> None:
    """Write a manifest completely or not at all. Raises as ``require_replaceable`` does."""
    require_replaceable(path, overwrite=overwrite)
    write_file(path, manifest_text(manifest).encode(), mark=MARK)


def require_replaceable(path: Location, *, overwrite: bool) -> None:
    """Raise Unsupported if a manifest must not or cannot be written."""
    if path.is_dir():
        raise Unsupported(f"{path}: is a folder; a manifest is a file")
    disk = on_disk(path)
    if disk is not None:
        nearest_folder(disk.parent)
    if (path.exists() or path.is_symlink()) and not overwrite:
        raise Unsupported(f"{path} already exists", hint="--overwrite replaces it")
    if disk is not None:
        require_marked(disk, MARK, noun="manifest")


def read_manifest(path: Location) -> CheckpointManifest:
    """Read a manifest from a file.

    Raises NotFound if it cannot be read, Damaged if it is not a manifest of a known version, is not
    what was written, or is incomplete.
    """
    try:
        data = by_place(path, partial(read_at_most, limit=_LARGEST + 1), RemotePath.read_bytes)
        if len(data) > _LARGEST:
            raise Damaged(f"{path}: more than {_LARGEST:,} bytes; too large for a manifest")
        text = data.decode()
    except OSError as error:
        raise NotFound(
            f"{path}: cannot be read: {(error.strerror or str(error)).lower()}", hint=_WRITES
        ) from None
    except UnicodeDecodeError:
        raise Damaged(f"{path}: not a manifest: not text") from None
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(
            f"{path}: not a manifest: not JSON, or truncated: {error}", hint=_WRITES
        ) from None
    return _parsed(content, path)


_WRITES = "`ckptool verify CKPT --write-manifest FILE` writes a manifest"


def _refuse_constant(word: str) -> None:
    raise ValueError(word)


def _parsed(content: Any, path: Location) -> CheckpointManifest:
    if not isinstance(content, dict) or "schema" not in content:
        raise Damaged(f"{path}: not a manifest: no schema")
    if content["schema"] != SCHEMA:
        raise Damaged(
            f"{path}: manifest schema {str(content['schema'])[:80]!r} is not supported;"
            f" this ckptool reads {SCHEMA!r}",
            hint="verify with the ckptool that wrote it, or a newer one",
        )
    recorded = content.pop("sha256", None)
    if recorded != text_digest(canonical_text(content)):
        raise Damaged(
            f"{path}: the manifest was changed: its own SHA-256 differs",
            hint="use an unchanged copy of the manifest",
        )
    try:
        return convert(content, CheckpointManifest)
    except ValidationError as error:
        raise Damaged(f"{path}: incomplete manifest: {error}") from None
