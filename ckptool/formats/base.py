"""What a format is, and what it may ask of the place where a checkpoint lies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeVar

from ckptool.core.catalog import Catalog
from ckptool.core.placing import Placed
from ckptool.core.tp_rules import NamedRule
from ckptool.errors import CkptoolError, Damaged, Problem, damaged
from ckptool.formats._file_kinds import HEAD, hint_for, stand_in
from ckptool.formats._pickle import LARGEST

_T = TypeVar("_T")


class Source(Protocol):
    """A folder of files, or one file, that can be read at any offset."""

    @property
    def root(self) -> str:
        """The folder, as the user would name it."""

    @property
    def files(self) -> Mapping[str, int]:
        """Every file below the root, by its relative path with ``/``, and its size in bytes."""

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes at ``offset``; Damaged where the file ends before."""

    def narrowed(self, folder: str) -> Source:
        """The part below a subfolder, as a source of its own."""

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """What is read next: file, offset and bytes of each. A store fetches it ahead."""


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """How to read what the files alone leave open, and what to do with damage.

    ``per_rank`` keeps plain tensors that differ between ranks as one tensor a rank;
    ``flat_params`` are the model's parameters with their shapes, in its own order, where FSDP1's
    flat ones shall be taken apart; ``tp_rules`` say, by glob, how tensor-parallel ranks'
    parameters fit together; ``world_size`` is the number of ranks whose files are read, where
    several saves lie in one folder or no file records it.

    Without ``values`` those that lie among the data are left ``UNREAD`` where a format can.

    Where there is a list ``found``, a scan steps over what is damaged and notes it there; without
    one, damage is raised.
    """

    per_rank: bool = False
    flat_params: tuple[tuple[str, tuple[int, ...]], ...] = ()
    tp_rules: tuple[NamedRule, ...] = ()
    found: list[Problem] | None = None
    values: bool = True
    world_size: int | None = None

    def report(self, problems: Sequence[str], *, subject: str, hint: str | None = None) -> None:
        """Raise one Damaged for all problems, or note them; nothing where there is none."""
        if not problems:
            return
        error = damaged(problems, subject=subject, hint=hint)
        if self.found is None:
            raise error
        self.found.extend(error.problems)

    def attempt(self, work: Callable[[], _T]) -> _T | None:
        """The result of ``work``, or None where it meets damage that is only noted."""
        if self.found is None:
            return work()
        try:
            return work()
        except CkptoolError as error:
            self.found.extend(error.problems)
            return None


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks of a writer.

    ``target`` is the last part of the target's path, ``max_shard_size`` the bytes of tensor data
    a file may hold, ``one_rank`` drops the source's own chunks, ``placed`` cuts the tensors for a
    new mesh instead. ``config`` is what a Hugging Face config beside the source says of the model.
    """

    target: str
    max_shard_size: int = 5_000_000_000
    one_rank: bool = False
    placed: Placed | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Format:
    """One checkpoint format: a row of the FORMATS table.

    - ``probe`` says from names and first bytes whether a source is of this format.
    - ``scan`` reads metadata only and returns the catalog.
    - ``locate`` opens the containers that ``scan`` left closed (``Item``), for the tensors of the
      catalog it is given; None where ``scan`` leaves none.
    - ``reads`` is False where the format is only recognised, to say why it cannot be read.
    - ``takes_tp_rules`` says that ``scan`` heeds ``ScanOptions.tp_rules``.
    - ``takes_world_size`` says that ``scan`` heeds ``ScanOptions.world_size``.
    """

    name: str
    summary: str
    probe: Callable[[Source], bool]
    scan: Callable[[Source, ScanOptions], Catalog]
    locate: Callable[[Source, Catalog], Catalog] | None = None
    reads: bool = True
    takes_tp_rules: bool = False
    takes_world_size: bool = False


def require(source: Source, file: str, *, wanted_by: str) -> int:
    """The size in bytes of a file that metadata names; Damaged where it is not in the folder."""
    size = source.files.get(file)
    if size is None:
        reason = "leads out of the folder" if _leaves(file) else "is missing"
        code = "path-outside" if _leaves(file) else "file-missing"
        raise Damaged(Problem(f"{file!r}, named by {wanted_by}, {reason}", code, file=file))
    return size


EXTRA = ".extra.pt"
"""How the file ends that holds what a safetensors file beside it cannot."""

MOST_RANKS = 1 << 20
EDGE = 2048
"""Bytes of an archive's ends that are read at once."""


def read_metadata(source: Source, file: str) -> bytes:
    """A whole file of metadata, JSON or pickle; Damaged where it is too large to be one."""
    size = source.files[file]
    if size > LARGEST:
        raise Damaged(f"{file}: {size:,} bytes; metadata is read up to {LARGEST:,} bytes")
    data = source.read(file, 0, size)
    kind = stand_in(data[:HEAD])
    if kind is not None:
        raise Damaged(
            Problem(f"{file}: {kind.what}", "file-unrecognised", file=file),
            hint=hint_for(kind, file),
        )
    return data


def expect_heads(source: Source, files: Iterable[str]) -> None:
    """The beginnings of these files, where their headers are, are read next."""
    sizes = source.files
    source.expect((file, 0, min(sizes[file], EDGE)) for file in files if file in sizes)


def expect_edges(source: Source, places: Iterable[tuple[str, int, int]]) -> None:
    """Both ends of these archives are read next: file, offset and bytes of each."""
    source.expect(span for place in places for span in _edges(*place))


def expect_archives(source: Source, files: Iterable[str]) -> None:
    """Both ends of these files are read next."""
    sizes = source.files
    expect_edges(source, ((file, 0, sizes[file]) for file in files if file in sizes))


def _edges(file: str, offset: int, nbytes: int) -> Iterator[tuple[str, int, int]]:
    edge = min(EDGE, nbytes)
    yield file, offset, edge
    yield file, offset + nbytes - edge, edge


def first_missing(present: Collection[int], expected: int) -> list[int]:
    """The ranks below ``expected`` that are not present, the first twelve of them."""
    return list(islice((rank for rank in range(expected) if rank not in present), 12))


def require_rank(rank: int, what: str) -> None:
    """Damaged where a rank, or a world size, is larger than any."""
    if rank > MOST_RANKS:
        message = f"{what}: rank {rank:,}; ckptool reads up to {MOST_RANKS:,} ranks"
        raise Damaged(Problem(message, "rank-missing"))


def _leaves(file: str) -> bool:
    return file.startswith(("/", "\\")) or ".." in file.replace("\\", "/").split("/")
