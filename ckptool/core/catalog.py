"""The content of every checkpoint: these bytes, at this place, are that box of that tensor.

Nothing here changes once made; of what there are millions only type checkers see to that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.dtype import DType

if TYPE_CHECKING:
    from ckptool.core.mesh import Mesh, Placement


class Record(NamedTuple):
    """A span of a file whose CRC-32 the writer recorded."""

    file: str
    offset: int
    nbytes: int
    crc32: int


class Extent(Struct, frozen=True):
    """Addressable bytes: element ``i`` is at ``offset + sum(i * strides)`` (all in bytes).

    ``ops`` turn the stored bytes into the values, element by element: the repairs ``byteswap``,
    ``conj``, ``neg``, and a key map's ``add+1``. ``record`` is the checksummed span around them.
    """

    file: str
    offset: int
    strides: tuple[int, ...]
    record: Record | None = None
    ops: tuple[str, ...] = ()


class EncodedBlob(Struct, frozen=True):
    """A blob that a codec must decode completely before any element can be addressed.

    ``nbytes`` is its size in the file, ``size`` the decoded size; ``start`` and ``strides`` address
    the decoded bytes as ``Extent`` addresses a file's. ``record`` is the checksummed span in the
    decoded bytes.
    """

    file: str
    offset: int
    nbytes: int
    codec: str
    size: int
    start: int
    strides: tuple[int, ...]
    ops: tuple[str, ...] = ()
    record: Record | None = None


class StridedPart(Struct, frozen=True):
    """The elements of a stored tensor of ``shape`` that a chunk consists of.

    ``start`` and ``strides`` count elements in the row-major order of ``shape``.
    """

    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


class Opening(Protocol):
    """Opens a container when its elements are read, once for all threads."""

    @property
    def start(self) -> int:
        """Where in the file its elements begin, judging by similar containers: what to fetch."""

    @property
    def edges(self) -> Sequence[tuple[str, int, int]]:
        """File, offset and bytes of what is read to open it; nothing if it is open."""

    def place(self, at: Container, shape: tuple[int, ...]) -> Place:
        """Return where the elements of a chunk of ``shape`` are, whatever ``start`` says.

        Raises the errors that the format's ``locate`` would have raised.
        """


class Container(Struct, frozen=True):
    """An archive or item in a file, not opened yet, with one chunk, or more than its ``part``.

    ``inspect`` never opens it; the format's ``locate`` turns it into another kind of place, or, if
    looking at it costs as much as its bytes, leaves an ``opening`` for its reader and sets
    ``part``. ``nbytes`` is its size in the file.
    """

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    part: StridedPart | None = None
    opening: Opening | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Container) and (
            (self.file, self.offset, self.nbytes, self.transforms, self.part)
            == (other.file, other.offset, other.nbytes, other.transforms, other.part)
        )

    def __hash__(self) -> int:
        return hash((self.file, self.offset, self.part))


class Computed(Struct, frozen=True):
    """Numbers that are computed of ``stored`` tensors when they are read.

    ``compute`` computes a box of a whole tensor; ``part`` is the chunk's part of that, in elements.
    ``reads`` says which boxes of stored tensors a box needs; by default all of each. Quantized
    numbers have one scale per ``block``, its elements in each dim. If a thread keeps ``kept`` bytes
    for the next box, one thread had better compute all, in order. ``exceeds`` says that sums may be
    beyond the range of their terms. A large box ``in_pieces`` takes little more memory.
    """

    stored: tuple[TensorEntry, ...]
    part: StridedPart
    compute: Compute
    block: tuple[int, ...] = ()
    reads: Reads | None = None
    kept: int = 0
    exceeds: bool = False
    in_pieces: bool = False

    @property
    def values(self) -> TensorEntry:
        """The quantized values, the first of what is stored."""
        return self.stored[0]

    @property
    def scales(self) -> TensorEntry:
        """The scales of quantized values."""
        return self.stored[1]

    @property
    def extras(self) -> tuple[TensorEntry, ...]:
        """What else quantized values have: a global scale, zero points, a table."""
        return self.stored[2:]

    @property
    def file(self) -> str:
        return self.stored[0].chunks[0].at.file

    @property
    def offset(self) -> int:
        return self.stored[0].chunks[0].at.offset

    def needs(self, box: Box) -> Iterable[tuple[TensorEntry, Box]]:
        """Return the boxes of stored tensors that a box of the whole is computed of."""
        if self.reads is not None:
            return self.reads(self, box)
        return [(entry, Box.whole(entry.shape)) for entry in self.stored]


Place = Extent | EncodedBlob | Container | Computed
Gather = Callable[["TensorEntry", Box], Any]
"""Reads a box of a tensor as stored, into a numpy array."""
Compute = Callable[[Gather, Computed, Box, DType], Any]
"""Computes a box of a whole tensor into a numpy array of elements of a type, rounded to it once."""
Reads = Callable[[Computed, Box], Iterable[tuple["TensorEntry", Box]]]
"""Says which boxes of stored tensors a box of a whole tensor is computed of."""


def stored_places(at: Place) -> Iterator[Extent | EncodedBlob | Container]:
    """Yield the places in files that a place, maybe a computed one, is read from."""
    if not isinstance(at, Computed):
        yield at
        return
    for entry in at.stored:
        for chunk in entry.chunks:
            yield from stored_places(chunk.at)


class Copy(Struct, frozen=True):
    """The same box, stored again by another rank."""

    at: Place
    rank: int


class Chunk(Struct, frozen=True):
    """A box of the global tensor, the place of its bytes, and the rank that wrote it if known."""

    box: Box
    at: Place
    rank: int | None = None
    copies: tuple[Copy, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its bytes are: its own place, then those of its copies."""
        return (self.at, *[copy.at for copy in self.copies])

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """The rank that wrote it, then those that wrote its copies."""
        return (self.rank, *[copy.rank for copy in self.copies])

    def at_places(self, places: Sequence[Place]) -> Chunk:
        """Return the chunk with other ``places`` for its bytes: its own, then each copy's."""
        copies = map(Copy, places[1:], [copy.rank for copy in self.copies])
        return Chunk(self.box, places[0], self.rank, tuple(copies))


class Index(Struct, frozen=True):
    """A position in a list or tuple, as one step of a path into a nested state dict."""

    position: int
    container: str = "list"

    def __str__(self) -> str:
        return str(self.position)


class RankStep(Struct, frozen=True):
    """The last step of the path of a value that differs between ranks: one rank's value."""

    step: Any
    rank: int

    def __str__(self) -> str:
        return f"{self.step}@rank{self.rank}"


Path = tuple[Any, ...]
"""Steps into a nested state dict: dict keys as they are, ``Index`` for lists and tuples."""


def flat_name(path: Path) -> str:
    """Return the name DCP gives to a path: its steps joined by dots."""
    return ".".join(map(str, path))


class TensorEntry(Struct, frozen=True):
    """One tensor: global shape, element type, and the chunks that tile it.

    ``stored`` is the element type in the files if a rewrite requests another ``dtype``; ``part`` is
    ``model``, ``optimizer`` or ``other`` if that was decided from the whole catalog.
    """

    name: str
    path: Path
    dtype: DType
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    placements: tuple[Placement, ...] | None = None
    mesh: Mesh | None = None
    stored: DType | None = None
    part: str | None = None

    def __repr__(self) -> str:
        return f"<ckptool.TensorEntry {self.name!r} {self.looks}>"

    @property
    def looks(self) -> str:
        """Shape, element type and placements, or else the number of chunks, in one line."""
        layout = "" if self.placements is None else ", ".join(map(str, self.placements))
        pieces = f"{len(self.chunks):,} chunks" if len(self.chunks) > 1 else ""
        return " ".join(filter(None, [str(list(self.shape)), str(self.dtype), layout or pieces]))

    @property
    def source_dtype(self) -> DType:
        """The element type of the bytes in the source's files."""
        return self.stored or self.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor, by torch's name."""
        return self.elements

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return self.elements * self.dtype.itemsize


class ObjectEntry(Struct, frozen=True):
    """A non-tensor value, plain data or inert pickle records. ``part`` is as a tensor's."""

    name: str
    path: Path
    value: Any
    part: str | None = None


class Unread:
    """Stands for a value that was not read."""

    def __repr__(self) -> str:
        return "not read"


UNREAD = Unread()


class Catalog(Struct, frozen=True):
    """Everything a checkpoint's metadata says, and no tensor's bytes.

    ``files`` maps each file, relative to the root, to its size in bytes. ``mesh_source`` is
    ``declared`` or ``inferred``. ``notes`` are remarks for the user that stop nothing;
    ``conflicts`` are the names that cannot be read because ranks contradict one another, and why.
    ``companions`` are files that belong to the model but contain no tensor (config.json,
    tokenizer), with their sizes in bytes. ``copies`` are files that repeat others and are not read.
    ``bare`` are the ``files`` without a structure of their own: metadata says where elements
    are in them, whatever their first bytes or their names look like. ``archives`` are the
    torch.save archives inside larger files, opened or not, including those of values. ``globals``
    are what its metadata files, all pickles, name: for each file, module and name of classes and
    functions, and the first byte. ``metadata`` are texts about tensors in headers of safetensors
    files, by file and key; under an empty name those for every file.

    ``info`` has what the files record of their origin, as short texts, and nothing that is only
    likely. ``writer`` is the code that wrote the files; ``framework`` what trained or serves the
    model, if different, and ``version`` its version, or else the writer's; ``parallelism`` the
    known degrees, in this order, as ``"TP 2, PP 2, DP 1, EP 2, CP 1"``; ``step`` the training step
    in digits, if no value of a known name has it; ``arguments`` the few that distinguish models, as
    ``"layers 4, hidden 64"``. Each of these is a row of ``inspect``; any other key follows the
    writer on its row.
    """

    format: str
    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    files: dict[str, int]
    world_size: int | None = None
    mesh: Mesh | None = None
    mesh_source: str | None = None
    info: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    conflicts: dict[str, str] = field(default_factory=dict)
    companions: dict[str, int] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()
    bare: frozenset[str] = frozenset()
    archives: Sequence[Container] = ()
    globals: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def with_tensors(self, tensors: dict[str, TensorEntry]) -> Catalog:
        return replace(self, tensors=tensors)


def places(entry: TensorEntry) -> Iterator[Place]:
    """Yield every place that holds bytes of the tensor, replicas included."""
    for chunk in entry.chunks:
        yield from chunk.places


def merge_copies(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Merge chunks of the same box: the first one of each box, with the rest as its copies."""
    merged: dict[Box, list[Chunk]] = {}
    for chunk in chunks:
        merged.setdefault(chunk.box, []).append(chunk)
    result = []
    for first, *rest in merged.values():
        copies = tuple(Copy(c.at, c.rank) for c in rest if c.rank is not None)
        result.append(replace(first, copies=copies) if copies or first.copies else first)
    return tuple(result)


def tied_names(catalog: Catalog) -> list[tuple[str, ...]]:
    """Group the names that are the same tensor: same bytes, shape and type.

    Tensors without dims, such as the step that an optimizer keeps for each parameter, are never
    grouped: a loader changes each separately.
    """
    groups: dict[object, list[str]] = {}
    solid = [e for e in catalog.tensors.values() if e.shape and e.elements and len(e.chunks)]
    chunks: Any  # tables know where they begin, without a chunk
    firsts = [
        getattr(chunks := entry.chunks, "begin", None) or (chunks[0].at.file, chunks[0].at.offset)
        for entry in solid
    ]
    counts = Counter(firsts)
    for entry, first in zip(solid, firsts, strict=True):
        if counts[first] > 1 and all(isinstance(c.at, Extent | Computed) for c in entry.chunks):
            extents = tuple((chunk.box, chunk.at) for chunk in entry.chunks)
            groups.setdefault((entry.dtype, entry.shape, extents), []).append(entry.name)
    return [tuple(names) for names in groups.values() if len(names) > 1]
