"""Names that tensors, or a part of a checkpoint, are stored under."""

from __future__ import annotations

import re

from ckptool.errors import Problem

_DATA = (
    *(".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".safetensors", ".distcp", ".npz", ".npy"),
    *(".gguf", ".onnx", ".h5", ".hdf5", ".keras", ".msgpack", ".pt2", ".nemo", ".ot", ".zarr"),
)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz")
MARKS = (".metadata", ".snapshot_metadata", "_METADATA", "manifest.ocdbt", ".zarray")
_RANKED = re.compile(
    r"(?:.*[._-])?(?:(?:[a-z]+_)?rank|world_size|shard|stage)[._-]?[0-9]+(?:[._-].*)?",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"(?P<whole>.*?)(?:\.tmp|\.dirty|\.incomplete|\.partial|\.part)")
_DIRTY = ".dirty.pt"


def unfinished_file(file: str) -> Problem | None:
    """Return that a file was never finished, where its name says so."""
    if not (_UNFINISHED.fullmatch(file) or file.endswith(_DIRTY)):
        return None
    message = f"{file}: by its name, its writing never ended"
    return Problem(message, "file-unfinished", file=file)


def is_data(file: str) -> bool:
    """Return whether a name is one that tensors, or a part of a checkpoint, are stored under."""
    *folders, name = file.split("/")
    if any(folder.startswith(".") for folder in folders):
        return False
    match = _UNFINISHED.fullmatch(name)
    name = match["whole"] if match else name
    plain = name.lower()
    for suffix in _PACKED:
        plain = plain.removesuffix(suffix)
    is_bare = "." not in plain or plain != name.lower()
    return name in MARKS or plain.endswith(_DATA) or (is_bare and bool(_RANKED.fullmatch(plain)))
