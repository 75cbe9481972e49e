"""Weight deltas of reinforcement learning: what changed since the version before, no weights.

slime (THUDM, ``UpdateWeightFromDiskDelta``, read at 624b824a of 2026-08) writes them like a model
in safetensors, and so do miles (radixark, 31f1ca96) and ModelExpress (0.7.0,
``CanonicalDeltaPublicationMethod``); SGLang's ``weight_sync.local_checkpoint`` (01d5bfe5) applies
them. The ``metadata`` of the index says:

- ``version`` and ``base_version``: slime's are counted in six digits, and version 0 is the model
  that the run began with; ModelExpress's are any texts.
- ``delta_encoding``: ``xor`` or, of slime and miles, ``overwrite``.
- ``compression_format``: ``zstd``, one frame of level 1 for each tensor.
- ``checksum_format``: ``xxh3-128``, ``blake3`` or ``adler32``; ModelExpress has the last only.

Each weight of which a byte changed is a tensor of bytes, U8 and of one dim, under the weight's
name: the compressed change of the weight's bytes, in row-major order and whatever their type is.
``xor`` has the old bytes xor the new ones; ``overwrite`` how many bytes changed (32 bits, little
endian), their positions in order (32 bits each), and their new values. The header of each file has
the checksum of all new bytes of each weight in it, in hexadecimal digits, under the weight's name.
A version in which nothing changed has an index and no files.

ModelExpress's files of buckets are among those that ``file_kinds.py`` knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged, Problem, Unsupported
from ckptool.formats.base import DELTA
from ckptool.formats.safetensors.shard_sets import index_of
from ckptool.formats.shards import read_index
from ckptool.serialization.source import Source

_ENCODING, _BASE = "delta_encoding", "base_version"
_MORE = ("compression_format", "checksum_format")
HINT = (
    "`ckptool merge OUT --apply-delta DELTA... --onto BASE` applies it to the weights of its base"
    " version"
)


class WeightDelta(Struct, frozen=True):
    """What a weight delta says of itself, and the checksum of each tensor that it changes."""

    version: str
    base_version: str
    encoding: str
    compression: str
    checksum: str
    digests: Mapping[str, str]


def read_delta(source: Source, catalog: Catalog) -> WeightDelta:
    """Return what the metadata of a weight delta say of it.

    Raises Unsupported for a checkpoint of weights, Damaged if a field or a checksum is missing, or
    if the index does not list all that there is.
    """
    if DELTA not in catalog.info:
        message = f"{source.root}: weights, no weight delta"
        raise Unsupported(message, hint="its index has no delta_encoding; it may be the --onto")
    index = index_of(source, None)
    headers = [*catalog.metadata.values()]
    metadata = list[object]()
    if index is not None:
        listed, said = read_index(source, index)
        metadata.append(said)
        _require_listed(source, index, listed, catalog)
    fields = next(m for m in (*metadata, *headers) if isinstance(m, Mapping) and delta_info([m]))
    keys = ("version", _BASE, _ENCODING, *_MORE)
    missing = [key for key in keys if fields.get(key) is None]
    if missing:
        raise Damaged(f"{source.root}: its metadata has no {', '.join(missing)}")
    digests = {name: text for texts in headers for name, text in texts.items()}
    for name, entry in catalog.tensors.items():
        if entry.dtype.name != "uint8" or len(entry.shape) != 1:
            raise Damaged(f"{source.root}: {name} is {entry.dtype}, no compressed bytes")
        if name not in digests:
            raise Damaged(f"{source.root}: {name} has no checksum in the header of its file")
    version, base, encoding, compression, checksum = (str(fields[key]) for key in keys)
    return WeightDelta(version, base, encoding, compression, checksum, digests)


def _require_listed(
    source: Source, index: str, listed: Mapping[str, str], catalog: Catalog
) -> None:
    """Raise Damaged for files and tensors that an index does not list: engines do not apply them.

    So a delta that was edited, or written over another, would be another one for each reader.
    """
    stored = {*listed.values()}
    files = [name for name in source.files if name.endswith(".safetensors") and "/" not in name]
    unlisted = sorted({*files} - stored) or [name for name in catalog.tensors if name not in listed]
    if unlisted:
        message = f"{source.root}: {index} does not list {unlisted[0]}"
        raise Damaged(message, hint="publish this delta again, into a folder of its own")


def delta_info(records: Iterable[object]) -> dict[str, str]:
    """Return the entry of ``Catalog.info`` for a weight delta, {} for weights.

    ``records`` are the metadata of an index and of headers; any of them may say so.
    """
    for metadata in records:
        if not isinstance(metadata, Mapping):
            continue
        base, encoding = metadata.get(_BASE), metadata.get(_ENCODING)
        details = [str(metadata[key]) for key in _MORE if metadata.get(key)]
        if encoding or (base is not None and details):
            version = metadata.get("version", "unknown")
            how = ", ".join([str(encoding or "unknown encoding"), *details])
            return {DELTA: f"version {version}, on base version {base}: {how}"}
    return {}


def delta_notes(info: Mapping[str, str]) -> list[Problem]:
    """Return the note that ``Catalog.info`` is that of a weight delta, none for weights."""
    description = info.get(DELTA)
    if description is None:
        return []
    message = f"a weight delta of reinforcement learning, not weights ({description})"
    return [Problem(message, "weight-delta").with_hint(HINT)]


def require_weights(catalog: Catalog, subject: str) -> None:
    """Raise Unsupported for a weight delta."""
    for note in delta_notes(catalog.info):
        raise Unsupported(note.within(subject), hint=HINT)
