"""Files that are not a checkpoint of a known format: what they are, and what to do with each.

Each is detected by its first bytes, its name, or the records of a zip archive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from shlex import quote
from string import digits
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.text import list_some, plural
from ckptool.errors import CkptoolError, Damaged, NoAnswer, Problem, Unrecognized
from ckptool.serialization.file_roles import may_be_empty

if TYPE_CHECKING:
    from ckptool.serialization.source import Source

HEAD = 512
"""Bytes of a file's beginning that are examined."""
_LONGEST_LINE = 60
_MOST_LOOKED_AT = 12


class FileKind(Struct, frozen=True):
    """What a file is, and the step that leads to a readable one.

    A file is of this kind if ``head`` matches its beginning and ``name`` its whole name.
    """

    what: str
    hint: str
    head: bytes = b""
    name: str = ".*"

    def hint_for(self, file: str) -> str:
        """Return the next step, with the name of the file in it."""
        return self.hint.replace("FILE", file)


_AGAIN = "if this is a failed download, download it again; private files need a token"
_NO_CHECKPOINT = "give the path of a checkpoint; if FILE should be one, copy or download it again"
_NO_TENSORS = "give the path of a checkpoint"
_ORIGINAL = "use the model that it was converted from"
_TAR = "tar -xf FILE -C FOLDER, then run ckptool on FOLDER"
_TRUSTED = "if you trust it, run in Python: torch.save({}, 'm.pt')"

_LFS = FileKind(
    "a git-lfs pointer to a file, not the file itself",
    "git lfs pull",
    rb"version https://git-lfs\.github\.com/spec/",
)
_PLACEHOLDERS = (
    _LFS,
    FileKind(
        "a Xet pointer, not the file itself", "get the file with hf download", rb"# xet version"
    ),
    FileKind(
        "an HTML page that a server sent in its place",
        _AGAIN,
        rb"(?i)\s*<(?:!doctype html|html|head|body)",
    ),
    FileKind("an XML document, such as a store's error", _AGAIN, rb"\s*<\?xml"),
)
"""Stand-ins for a file: a pointer to it, or a server's answer."""

_NPZ = FileKind(
    "a NumPy archive (.npz)",
    "safetensors.numpy.save_file(dict(numpy.load('FILE')), 'm.safetensors')",
    name=r".*\.npz",
)
_EXPORTED = FileKind(
    "a program that torch.export saved (.pt2)",
    _TRUSTED.format("torch.export.load('FILE').state_dict"),
    name=r".*\.pt2",
)
_KERAS = FileKind(
    "a Keras model (.keras)",
    "unzip FILE; with h5py: save the arrays of model.weights.h5",
    name=r".*\.keras",
)
_ZIP_OF_OTHERS = FileKind(
    "a zip archive of other files",
    "unzip FILE -d FOLDER, then run ckptool on FOLDER",
    # 26 bytes before the first name, a folder of up to 100, and no other archive inside
    rb"PK\x03\x04(?!(?:(?!PK\x03\x04).){26,126}/data\.pkl)",
    r".*\.(?:zip|mar|mdlus)",  # of TorchServe, and of PhysicsNeMo, which has a model.pt
)
_KINDS = (
    *_PLACEHOLDERS,
    FileKind(
        "a NeMo archive that is compressed (gzip), as NeMo before 1.7 wrote it",
        "tar -xzf FILE -C FOLDER, then run ckptool on FOLDER/model_weights.ckpt",
        rb"\x1f\x8b",
        r".*\.nemo",
    ),
    FileKind("gzip-compressed", "gzip -d FILE, or for a .tar.gz: tar -xzf FILE", rb"\x1f\x8b"),
    FileKind("zstd-compressed", "zstd -d FILE", rb"\x28\xb5\x2f\xfd"),
    FileKind("xz-compressed", "xz -d FILE", rb"\xfd7zXZ\x00"),
    FileKind("bzip2-compressed", "bzip2 -d FILE", rb"BZh"),
    FileKind("lz4-compressed", "lz4 -d FILE", rb"\x04\x22\x4d\x18"),
    FileKind("a 7z archive", "7z x FILE", rb"7z\xbc\xaf\x27\x1c"),
    FileKind("a RAR archive", "unrar x FILE", rb"Rar!\x1a\x07"),
    FileKind(
        "one NumPy array (.npy)",
        "safetensors.numpy.save_file({'NAME': numpy.load('FILE')}, 'm.safetensors')",
        rb"\x93NUMPY",
    ),
    FileKind(
        "a GGUF model of llama.cpp",
        "use the model that it was converted from; or with transformers:"
        " from_pretrained(FOLDER, gguf_file='FILE').save_pretrained('m')",
        rb"GGUF",
    ),
    FileKind("a GGML model of llama.cpp", _ORIGINAL, rb"lmgg|tjgg"),
    FileKind(
        "an HDF5 file, such as Keras writes",
        "with h5py: safetensors.numpy.save_file of its arrays by their paths",
        rb"\x89HDF\r\n\x1a\n",
    ),
    FileKind("a TensorFlow Lite model", _ORIGINAL, rb".{4}TFL3"),
    FileKind("a Parquet table, no tensors", _NO_TENSORS, rb"PAR1"),
    FileKind("an Arrow table, no tensors", _NO_TENSORS, rb"ARROW1"),
    FileKind("an SQLite database, no tensors", _NO_TENSORS, rb"SQLite format 3"),
    FileKind("a program or library, no tensors", _NO_TENSORS, rb"\x7fELF"),
    FileKind("a PDF, no tensors", _NO_TENSORS, rb"%PDF"),
    FileKind("a NeMo archive (tar)", _TAR, rb".{257}ustar", r".*\.nemo"),
    FileKind("a tar archive", _TAR, rb".{257}ustar"),
    FileKind(
        "a weight delta of reinforcement learning by ModelExpress, not weights",
        "apply it with ModelExpress to the weights of its base version, and use the result",
        rb"MXCDV0\0",
    ),
    FileKind(
        "part of a TensorFlow checkpoint",
        "with tensorflow: tf.train.load_checkpoint(PREFIX), then safetensors.numpy.save_file of its"
        " tensors",
        name=r"(?:.*\.)?data-[0-9]{5}-of-[0-9]{5}|(?:.*\.)?ckpt.*\.index|variables\.index"
        r"|saved_model\.pb",
    ),
    FileKind("a DVC pointer, not the file itself", "dvc pull", name=r".*\.dvc"),
    _NPZ,
    _EXPORTED,
    _KERAS,
    FileKind(
        "an ONNX model",
        "with onnx: safetensors.numpy.save_file of numpy_helper.to_array(i) for each initializer i",
        name=r".*\.onnx",
    ),
    FileKind(
        "a Flax checkpoint (msgpack)",
        "with flax: safetensors.flax.save_file of serialization.msgpack_restore(DATA), flattened",
        name=r".*\.msgpack",
    ),
    FileKind(
        "a TensorFlow graph", "with tensorflow: save its variables as safetensors", name=r".*\.pb"
    ),
    FileKind("a TensorFlow Lite model", _ORIGINAL, name=r".*\.tflite"),
    FileKind("a Core ML model", _ORIGINAL, name=r".*\.mlmodel"),
    FileKind("a TensorRT engine", _ORIGINAL, name=r".*\.engine"),
    FileKind(
        "a checkpoint of rust-bert",
        "use the torch.save file that it was converted from",
        name=r".*\.ot",
    ),
    FileKind(
        "a plain pickle, which torch.save did not write",
        _TRUSTED.format("pickle.load(open('FILE', 'rb'))"),
        rb"\x80[\x02-\x05]",
    ),
    _ZIP_OF_OTHERS,
    FileKind(
        "a zip archive, such as torch.save writes",
        "use --from torch-save if torch.save wrote it",
        rb"PK\x03\x04",
    ),
    FileKind("zeros, bytes that were never written", "use another copy of the file", rb"\0{16,}\Z"),
    FileKind(
        "an index of shards, which holds no tensor",
        "put the shards into its folder",
        rb'.*"weight_map"',
    ),
)
"""The kinds in the order in which they are tried: by the head, by the name, by the content."""
_SAFETENSORS = re.compile(rb".{6}\0\0\{", re.DOTALL)
"""A header's length in 8 bytes, which may equal any magic number, and its JSON."""


def detect_placeholder(head: bytes) -> FileKind | None:
    """Return the kind of placeholder that begins with these bytes; None for other bytes."""
    kind = _first_match(_PLACEHOLDERS, head, "")
    size = re.search(rb"\nsize ([0-9]{1,18})", head) if kind is _LFS else None
    if size is not None:
        return replace(_LFS, what=_LFS.what.replace(",", f" of {int(size[1]):,} bytes,"))
    return kind


def detect_kind(head: bytes, name: str) -> FileKind | None:
    """Return the kind of a file that begins with these ``HEAD`` bytes; None if unknown.

    Also None for a safetensors file, even a truncated one.
    """
    if _SAFETENSORS.match(head):
        return None
    last = name.rpartition("/")[2]
    return detect_placeholder(head) or _first_match(_KINDS, head, last) or _text_kind(head)


def _first_match(kinds: Iterable[FileKind], head: bytes, name: str) -> FileKind | None:
    for kind in kinds:
        if re.match(kind.head, head, re.DOTALL) and re.fullmatch(kind.name, name, re.I | re.DOTALL):
            return kind
    return None


def _text_kind(head: bytes) -> FileKind | None:
    """Return that a file is text, with its first line; None if it is not."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        # a character may be cut at the end of the head
        text = head[: error.start].decode() if len(head) - error.start < 4 else ""
    line = text.strip().partition("\n")[0][:_LONGEST_LINE]
    if not line or not all(char.isprintable() or char.isspace() for char in text):
        return None
    return FileKind(f"a text file; its first line is {line!r}", _NO_CHECKPOINT)


def _zip_kind(names: Collection[str], file: str) -> FileKind | None:
    """Return the kind of a zip archive that contains these records and is not a torch.save file."""
    inner = {name.partition("/")[2] for name in names}
    if names and all(name.endswith(".npy") for name in names):
        return _NPZ
    if "archive_format" in inner or any("exported_program" in name for name in names):
        return _EXPORTED
    if "model.weights.h5" in names:
        return _KERAS
    is_torchs = any(name.rpartition("/")[2] == "data.pkl" for name in names)
    if is_torchs or not file.endswith((".zip", ".mar", ".mdlus")):
        return None
    return _ZIP_OF_OTHERS


def require_packed(folder: object, names: Collection[str]) -> None:
    """Raise Unrecognized if a torch.save file was unpacked into a folder of these names.

    It has the pickle, and ``version`` or storages (torch 1.6 to 2.13); a program has more.
    """
    paths = {*names} | {name.rpartition("/")[0] for name in names}
    heads = (name[: -len("data.pkl")] for name in names if f"/{name}".endswith("/data.pkl"))
    for head in (head for head in heads if {f"{head}version", f"{head}data"} & paths):
        path = f"{folder}/{head}".rstrip("/")
        parent, _, name = path.rpartition("/")
        kind = "TorchScript" if f"{head}constants.pkl" in paths else "torch.save"
        raise Unrecognized(
            f"{path}: a {kind} file that was unpacked: its data.pkl, data/ and version",
            hint=f"pack the folder again: (cd {quote(parent)} && python -m zipfile -c"
            f" {quote(name)}.pt {quote(name)})",
        )


def not_a(expected: str, source: Source, file: str) -> Damaged:
    """Return the error for a file that should be ``expected`` but is something else."""
    head = read_head(source, file)
    kind = detect_kind(head, file)
    what = f"not {expected} (it begins with {head[:8].hex(' ')})"
    if kind is not None:
        what = f"{kind.what}, not {expected}"
    problem = Problem(f"{file}: {what}", "file-type-mismatch", file=file)
    return Damaged(problem, hint=kind.hint_for(file) if kind else None)


def unrecognized_zip(names: Collection[str], file: str) -> Unrecognized:
    """Return the error for a zip archive that torch.save did not write."""
    kind = _zip_kind(names, file)
    what = kind.what if kind else "a zip archive, but not one that torch.save wrote"
    problem = Problem(f"{file}: {what}", "file-type-mismatch", file=file)
    return Unrecognized(problem, hint=kind.hint_for(file) if kind else None)


def read_head(source: Source, file: str) -> bytes:
    """Return the beginning of a file, for ``detect_kind``."""
    return source.read(file, 0, min(HEAD, source.files[file]))


_HASH = re.compile(r"[0-9a-f]{32,}")
_SMALLEST = 512
"""Bytes that a file of torch.save has more than."""


def has_no_suffix(name: str) -> bool:
    """Return whether a file's name has no suffix, or one of torch.save before the last part."""
    last = name.rpartition("/")[2]
    return "." not in last or _COUNTED_ON.search(last) is not None


def is_unnamed_torch(source: Source, name: str) -> bool:
    """Return whether a file without a suffix is of torch.save by its first bytes.

    As ``g_00005000`` of HiFi-GAN, or ``model.pt.ep3`` of FunASR. False for a name that is a hash,
    an entry of a store to which saved files link, and for one that is a number, a chunk of an
    array. Raises NoAnswer.
    """
    last = name.rpartition("/")[2]
    if not has_no_suffix(last) or last.isdecimal() or _HASH.fullmatch(last):
        return False
    if source.files[name] < _SMALLEST:
        return False
    try:
        head = read_head(source, name)
    except NoAnswer:
        raise
    except (CkptoolError, OSError):
        return False
    return head.startswith(b"PK\x03\x04") and b"/data.pkl" in head


_COUNTED_ON = re.compile(
    r"(?i)\.(?:pt|pth|th|ckpt|bin|tar)[-_.]"
    r"(?:(?:(?:ep|epoch|step|iter|avg)[-_]?\d+|0|[1-9]\d*)(?:\.\d+)?|best|last)$"
)
"""What says of which save a file is, behind its suffix; not behind one that is not finished.

``model.pt.00`` is the first part of a file that was split.
"""
_COUNTS = re.compile(
    rb"(?:(?:[\w.-]+: *)?(?:[-+]?[\d.]+(?:e[-+]?\d+)?|true|false|nan|inf)|)\s*", re.IGNORECASE
)
_OF_A_STEP = r"(?i)(?<![a-z])(?:checkpoint|ckpt|best|final|last|latest)(?![a-z])"
"""What a checkpoint is called by, whatever it is of."""
_NO_DIGITS = str.maketrans("", "", digits)


def holds_counts_alone(source: Source, file: str, larger: Callable[[], Container[str]]) -> bool:
    """Return whether a file is a text of numbers, as SpeechBrain keeps beside tensors.

    False for a file that is called like a checkpoint, which is damaged then, and for one whose
    name is among those of ``larger`` files, or differs from one in digits only.
    """
    if not 0 < source.files[file] <= HEAD:
        return False
    name = file.rpartition("/")[2]
    stem = name.partition(".")[0]
    if re.search(_OF_A_STEP, stem) or not may_be_empty(stem):
        return False
    head = read_head(source, file)
    if not head.strip() or not all(map(_COUNTS.fullmatch, head.split(b"\n"))):
        return False
    return name.translate(_NO_DIGITS) not in larger()


def larger_names(source: Source) -> set[str]:
    """Return the names, without digits, of files that hold more than a few numbers."""
    larger = (name for name, size in source.files.items() if size > HEAD)
    return {name.rpartition("/")[2].translate(_NO_DIGITS) for name in larger}


def nothing_found(
    path: object, around: object, source: Source, folders: Collection[str]
) -> Unrecognized:
    """Return the error for a folder without a checkpoint, with what else is in and around it.

    ``folders`` are the names of those right in it, which may be empty.
    """
    names = list(source.files)
    if not names:
        inner = f"no file in it, nor in {list_some(folders)}"
        if source.unlisted:
            inner = "no file in it; " + list_some([f"{n}: {p}" for n, p in source.unlisted.items()])
        hint = f"`ckptool inspect {quote(str(around))}` shows what is beside it"
        return Unrecognized(f"{path}: {inner if folders else 'the folder is empty'}", hint=hint)
    message = f"{path}: no checkpoint found in {plural(len(names), 'file')}: {list_some(names)}"
    hint = "run `ckptool formats` to list known formats; use --from FORMAT to force one"
    for name, kind in _foreign_files(source):
        return Unrecognized(f"{message}; {name} is {kind.what}", hint=kind.hint_for(name))
    return Unrecognized(message, hint=hint)


def _foreign_files(source: Source) -> Iterator[tuple[str, FileKind]]:
    """Yield the files that look like checkpoints or stand in for one, largest first."""
    names = sorted(source.files, key=lambda name: -source.files[name])
    for name in names[:_MOST_LOOKED_AT]:
        try:
            kind = detect_kind(read_head(source, name), name)
        except CkptoolError:
            continue
        if kind is not None and kind.hint not in (_NO_TENSORS, _NO_CHECKPOINT):
            yield name, kind
