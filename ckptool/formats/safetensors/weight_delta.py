"""Weight deltas of reinforcement learning: what changed since the version before, no weights.

slime (THUDM, ``UpdateWeightFromDiskDelta``, 2026) writes them like a model in safetensors: one
tensor of bytes for each weight that changed, compressed, under the weight's name. SGLang's
``weight_sync.disk_delta`` applies them. The ``metadata`` of the index says so: ``version``,
``base_version``, ``delta_encoding`` (``xor`` or ``overwrite``), ``compression_format`` and
``checksum_format``. ModelExpress's own files are among those that ``file_kinds.py`` knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptool.core.catalog import Catalog
from ckptool.errors import Problem, Unsupported

_ENCODING, _BASE = "delta_encoding", "base_version"
_MORE = ("compression_format", "checksum_format")
_INFO = "delta"
HINT = "apply it with what wrote it to the weights of its base version, and use the result"


def delta_info(said: Iterable[object]) -> dict[str, str]:
    """Return the entry of ``Catalog.info`` for a weight delta, {} for weights.

    ``said`` is the metadata of an index and of headers; any of them may say so.
    """
    for metadata in said:
        if not isinstance(metadata, Mapping):
            continue
        base, encoding = metadata.get(_BASE), metadata.get(_ENCODING)
        more = [str(metadata[key]) for key in _MORE if metadata.get(key)]
        if encoding or (base is not None and more):
            version = metadata.get("version", "unknown")
            how = ", ".join([str(encoding or "unknown encoding"), *more])
            return {_INFO: f"version {version}, on base version {base}: {how}"}
    return {}


def delta_notes(info: Mapping[str, str]) -> list[Problem]:
    """Return the note that ``Catalog.info`` is that of a weight delta, none for weights."""
    said = info.get(_INFO)
    if said is None:
        return []
    message = f"a weight delta of reinforcement learning, not weights ({said})"
    return [Problem(message, "weight-delta").with_hint(HINT)]


def require_weights(catalog: Catalog, subject: str) -> None:
    """Raise Unsupported for a weight delta."""
    for note in delta_notes(catalog.info):
        raise Unsupported(note.within(subject), hint=HINT)
