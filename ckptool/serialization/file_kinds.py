"""Files that are no checkpoint of a known format: what they are, and what to do with each.

Told by how they begin, by what a zip archive holds, or by what they are called.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from ckptool.errors import Damaged, Problem, Unrecognised

if TYPE_CHECKING:
    from ckptool.serialization.source import Source

HEAD = 512
"""Bytes of a file's beginning that tell it."""
_TAR_AT = 257
_MANY = 16
"""As many zeros as are no number."""
_LONGEST_LINE = 60


class FileKind(NamedTuple):
    """What a file is, and the step that leads to one that can be read."""

    what: str
    hint: str


_AGAIN = "download the file again; a private one needs a token"
_AS_TORCH = "in a process that trusts it: torch.save({}, 'm.pt')"
_XET = FileKind("a Xet pointer, not the file itself", "hf download fetches the file")
_LFS = b"version https://git-lfs.github.com/spec/"

_BY_HEAD: tuple[tuple[int, bytes, FileKind], ...] = (
    (0, b"\x1f\x8b", FileKind("gzip-compressed", "gzip -d FILE; of a .tar.gz: tar -xzf FILE")),
    (0, b"\x28\xb5\x2f\xfd", FileKind("zstd-compressed", "zstd -d FILE")),
    (0, b"\xfd7zXZ\x00", FileKind("xz-compressed", "xz -d FILE")),
    (0, b"BZh", FileKind("bzip2-compressed", "bzip2 -d FILE")),
    (0, b"\x04\x22\x4d\x18", FileKind("lz4-compressed", "lz4 -d FILE")),
    (0, b"7z\xbc\xaf\x27\x1c", FileKind("a 7z archive", "7z x FILE")),
    (0, b"Rar!\x1a\x07", FileKind("a RAR archive", "unrar x FILE")),
    (
        0,
        b"\x93NUMPY",
        FileKind(
            "one NumPy array (.npy)",
            "safetensors.numpy.save_file({'NAME': numpy.load('FILE')}, 'm.safetensors')",
        ),
    ),
    (
        0,
        b"GGUF",
        FileKind(
            "a GGUF model of llama.cpp",
            "ckptool reads what it was made from; or transformers'"
            " from_pretrained(FOLDER, gguf_file='FILE').save_pretrained('m')",
        ),
    ),
    (0, b"lmgg", FileKind("a GGML model of llama.cpp", "take the model that it was made from")),
    (0, b"tjgg", FileKind("a GGML model of llama.cpp", "take the model that it was made from")),
    (
        0,
        b"\x89HDF\r\n\x1a\n",
        FileKind(
            "an HDF5 file, such as Keras writes",
            "with h5py: safetensors.numpy.save_file of its arrays by their paths",
        ),
    ),
    (4, b"TFL3", FileKind("a TensorFlow Lite model", "take the model that it was made from")),
    (0, b"PAR1", FileKind("a Parquet table, no tensors", "name a checkpoint")),
    (0, b"ARROW1", FileKind("an Arrow table, no tensors", "name a checkpoint")),
    (0, b"SQLite format 3", FileKind("an SQLite database, no tensors", "name a checkpoint")),
    (0, b"\x7fELF", FileKind("a program or library, no tensors", "name a checkpoint")),
    (0, b"%PDF", FileKind("a PDF, no tensors", "name a checkpoint")),
)

_NPZ = FileKind(
    "a NumPy archive (.npz)",
    "safetensors.numpy.save_file(dict(numpy.load('FILE')), 'm.safetensors')",
)
_EXPORTED = FileKind(
    "a program that torch.export saved (.pt2)",
    _AS_TORCH.format("torch.export.load('FILE').state_dict"),
)
_KERAS = FileKind(
    "a Keras model (.keras)", "unzip FILE; with h5py: save the arrays of model.weights.h5"
)
_ZIP = FileKind(
    "a zip archive, such as torch.save writes", "--from torch-save reads what torch.save wrote"
)

_BY_SUFFIX: dict[str, FileKind] = {
    ".dvc": FileKind("a DVC pointer, not the file itself", "dvc pull fetches the file"),
    ".npz": _NPZ,
    ".pt2": _EXPORTED,
    ".keras": _KERAS,
    ".onnx": FileKind(
        "an ONNX model",
        "with onnx: safetensors.numpy.save_file of numpy_helper.to_array(i) for each initializer i",
    ),
    ".msgpack": FileKind(
        "a Flax checkpoint (msgpack)",
        "with flax: safetensors.flax.save_file of serialization.msgpack_restore(DATA), flattened",
    ),
    ".pb": FileKind("a TensorFlow graph", "with tensorflow: save its variables as safetensors"),
    ".tflite": FileKind("a TensorFlow Lite model", "take the model that it was made from"),
    ".mlmodel": FileKind("a Core ML model", "take the model that it was made from"),
    ".engine": FileKind("a TensorRT engine", "take the model that it was made from"),
    ".ot": FileKind("a checkpoint of rust-bert", "take the torch.save file that it was made from"),
}
_TENSORFLOW = FileKind(
    "part of a TensorFlow checkpoint",
    "with tensorflow: tf.train.load_checkpoint(PREFIX), then safetensors.numpy.save_file of its"
    " tensors",
)
_TENSORFLOW_FILE = re.compile(
    r"(?:.*\.)?data-[0-9]{5}-of-[0-9]{5}|(?:.*\.)?ckpt.*\.index|variables\.index|saved_model\.pb"
)
_SAFETENSORS = re.compile(rb".{6}\0\0\{", re.DOTALL)
"""A header's length in 8 bytes, which may be those of any magic number, and its JSON."""
_HTML = re.compile(rb"\s*<(?:!doctype html|html|head|body)", re.IGNORECASE)


def stand_in(head: bytes) -> FileKind | None:
    """What stands in a file's place and begins so: a pointer to it, or what a server answered."""
    if head.startswith(_LFS):
        return _lfs_pointer(head)
    if head.startswith(b"# xet version"):
        return _XET
    if _HTML.match(head):
        return FileKind("an HTML page that a server sent in its place", _AGAIN)
    if head.lstrip().startswith(b"<?xml"):
        return FileKind("an XML document, such as a store's error", _AGAIN)
    return None


def kind_of(head: bytes, name: str) -> FileKind | None:
    """What a file is that begins with these ``HEAD`` bytes; None where nothing tells it.

    None too where it is a safetensors file, even one that is cut short.
    """
    if _SAFETENSORS.match(head):
        return None
    kind = stand_in(head)
    if kind is not None:
        return kind
    for at, magic, kind in _BY_HEAD:
        if head[at : at + len(magic)] == magic:
            return kind
    if head[_TAR_AT:].startswith(b"ustar"):
        what = "a NeMo archive (tar)" if name.endswith(".nemo") else "a tar archive"
        return FileKind(what, "tar -xf FILE -C FOLDER, and name what lies in FOLDER")
    last = name.rpartition("/")[2]
    if _TENSORFLOW_FILE.fullmatch(last):
        return _TENSORFLOW
    suffix = last[last.rfind(".") :].lower() if "." in last else ""
    return _BY_SUFFIX.get(suffix) or _by_content(head)


def _by_content(head: bytes) -> FileKind | None:
    """What only the whole beginning tells: a pickle, zeros, JSON or other text."""
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        loaded = "pickle.load(open('FILE', 'rb'))"
        return FileKind("a plain pickle, which torch.save did not write", _AS_TORCH.format(loaded))
    if head.startswith(b"PK\x03\x04"):
        return _ZIP
    if len(head) >= _MANY and not head.strip(b"\0"):
        return FileKind("zeros, bytes that were never written", "take another copy of the file")
    if b'"weight_map"' in head:
        return FileKind("an index of shards, which holds no tensor", "bring the shards beside it")
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        # A character may be cut where the beginning ends.
        text = head[: error.start].decode() if len(head) - error.start < 4 else ""
    line = text.strip().partition("\n")[0][:_LONGEST_LINE]
    if not line or not all(char.isprintable() or char.isspace() for char in text):
        return None
    return FileKind(f"text ({line!r})", _AGAIN)


def _lfs_pointer(head: bytes) -> FileKind:
    size = re.search(rb"\nsize ([0-9]{1,18})", head)
    of = f" of {int(size[1]):,} bytes" if size else ""
    return FileKind(f"a git-lfs pointer to a file{of}, not the file itself", "git lfs pull")


def kind_of_zip(names: Collection[str], file: str) -> FileKind | None:
    """What a zip archive is that holds these records and is no torch.save file."""
    inner = {name.partition("/")[2] for name in names}
    if names and all(name.endswith(".npy") for name in names):
        return _NPZ
    if "archive_format" in inner or any("exported_program" in name for name in names):
        return _EXPORTED
    if "model.weights.h5" in names:
        return _KERAS
    if any(name.rpartition("/")[2] == "data.pkl" for name in names):
        return None
    suffix = file[file.rfind(".") :]
    if suffix not in (".zip", ".mar"):
        return None
    return FileKind("a zip archive of other files", "unzip FILE, and name what lies in it")


def not_a(expected: str, source: Source, file: str) -> Damaged:
    """The error for a file that should be ``expected`` and is something else."""
    head = read_head(source, file)
    kind = kind_of(head, file)
    found = (
        f"{kind.what}, not {expected}" if kind else f"not {expected} (it begins with {begin(head)})"
    )
    problem = Problem(f"{file}: {found}", "file-type-mismatch", file=file)
    return Damaged(problem, hint=hint_for(kind, file) if kind else None)


def unrecognised_zip(names: Collection[str], file: str) -> Unrecognised:
    """The error for a zip archive that torch.save did not write."""
    kind = kind_of_zip(names, file)
    what = kind.what if kind else "a zip archive, but not one that torch.save wrote"
    problem = Problem(f"{file}: {what}", "file-type-mismatch", file=file)
    return Unrecognised(problem, hint=hint_for(kind, file) if kind else None)


def hint_for(kind: FileKind, file: str) -> str:
    """The next step, with the name of the file in it."""
    return kind.hint.replace("FILE", file)


def begin(head: bytes) -> str:
    """The first bytes, where nothing tells what they are."""
    return head[:8].hex(" ")


def read_head(source: Source, file: str) -> bytes:
    """The beginning of a file, as ``kind_of`` wants it."""
    return source.read(file, 0, min(HEAD, source.files[file]))
