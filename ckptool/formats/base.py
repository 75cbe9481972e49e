"""What a format is, and what it can request of the place of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from msgspec import Struct, field

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.layout import Layout
from ckptool.core.sharding.placement import PlacedTensors, PlacementRule
from ckptool.core.sharding.tensor_parallel import NamedRule
from ckptool.errors import CkptoolError, Problem, Unrecognized, Unsupported, damaged

if TYPE_CHECKING:
    from ckptool.serialization.safetensors import SafetensorsFile
    from ckptool.serialization.source import Source


_T = TypeVar("_T")


class ScanOptions(Struct, frozen=True):
    """How to read what the files alone do not determine, and what to do with damage.

    ``per_rank`` keeps plain tensors that differ between ranks as one tensor per rank;
    ``flat_params`` are the model's parameters with their shapes, in its own order, to unflatten
    FSDP1's; ``tp_rules`` say, by glob, how tensor-parallel ranks' parameters fit together;
    ``world_size`` is the number of ranks whose files are read, if several saves share a folder or
    no file records it.

    ``user_file`` is the one whose path the user gave, if a folder has several checkpoints.

    Without ``values``, those among the data are left ``UNREAD`` if a format can. Without
    ``placements``, no mesh is inferred from the chunks: only what shows or keeps placements asks
    for them.

    With a list ``problems`` a scan skips damaged parts and notes them there; else it raises. With
    ``headers``, it notes there those of the safetensors files in which nothing was skipped.
    """

    per_rank: bool = False
    flat_params: tuple[tuple[str, tuple[int, ...]], ...] = ()
    tp_rules: tuple[NamedRule, ...] = ()
    problems: list[Problem] | None = None
    values: bool = True
    world_size: int | None = None
    user_file: str | None = None
    placements: bool = True
    headers: dict[str, SafetensorsFile] | None = None

    def with_placements(self, catalog: Catalog) -> Catalog:
        """Return the catalog with the mesh and placements that its chunks imply, if asked for."""
        if not self.placements:
            return catalog
        from ckptool.core.sharding.infer import with_inferred_mesh

        return with_inferred_mesh(catalog)

    def report(self, problems: Sequence[str], *, subject: str, hint: str | None = None) -> None:
        """Raise one Damaged for all problems, or note them; do nothing if there are none."""
        if not problems:
            return
        error = damaged(problems, subject=subject, hint=hint)
        if self.problems is None:
            raise error
        self.problems.extend(error.problems)

    def attempt(self, work: Callable[[], _T]) -> _T | None:
        """Return the result of ``work``, or None if it meets damage that is only noted."""
        if self.problems is None:
            return work()
        try:
            return work()
        except CkptoolError as error:
            self.problems.extend(error.problems)
            return None


class Request(Struct, frozen=True):
    """The user's request to a writer.

    ``target`` is the last part of the target's path, ``max_shard_size`` the bytes of tensor data a
    file may hold, ``one_rank`` drops the source's own chunks, ``placed`` cuts the tensors for a new
    mesh instead. ``config`` is the model's Hugging Face config beside the source, ``assets`` the
    names of files from elsewhere that are put beside the output.
    """

    target: str
    max_shard_size: int = 5_000_000_000
    one_rank: bool = False
    placed: PlacedTensors | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    assets: frozenset[str] = frozenset()


LayOut = Callable[[Catalog, Request], Layout]
"""Lays out a catalog in a format's files."""


class Deferred(Struct, frozen=True):
    """A function given as ``module:function``, whose module is imported on the first call."""

    place: str

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function. Raises ImportError or AttributeError."""
        module, _, name = self.place.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.load()(*arguments, **keywords)


class Locate(Protocol):
    """Opens the ``Container`` places of a catalog's tensors."""

    def __call__(self, source: Source, catalog: Catalog, *, defers: bool = False) -> Catalog:
        """Return the catalog with its containers opened, or some of them when they are read."""


class FileRole(Enum):
    """What a file of a checkpoint consists of, and so how it can be checked by itself."""

    METADATA = "a pickle that describes the content of other files"
    ITEMS = "torch.save archives, one behind the other"
    SAFETENSORS = "a safetensors file"
    INDEX = "the JSON of a Hugging Face index"
    JSON = "other JSON"


class FileRule(Struct, frozen=True):
    """The role of files whose whole path, below any folder, matches a regular expression.

    ``committed_by`` names the file that is written last, into the same folder.
    """

    pattern: str
    role: FileRole
    committed_by: str = ""

    def matches(self, file: str) -> bool:
        """Return whether a path is one of these files."""
        return re.fullmatch(f"(.*/)?({self.pattern})", file) is not None


class LatestMarker(Struct, frozen=True):
    """The file of a run's folder that names its latest checkpoint, and such folders' pattern."""

    file: str
    folders: str = ".*"


class Recovery(Struct, frozen=True):
    """The content of data files whose metadata is lost, and what no file records any more."""

    catalog: Catalog
    problems: tuple[Problem, ...]
    unknown: tuple[str, ...] = ()


class Detection(Struct, frozen=True):
    """How checkpoints of a format are found.

    ``probe`` returns a true value for a source whose names and first bytes are of this format; it
    is None if its checkpoints are detected as another format's. ``files`` say what files are by
    their names; those of all formats come second. ``suffixes`` are those of files that are a
    checkpoint each, ``folder`` names the format of a folder of such files, where it is another.

    ``other_saves`` returns the files of all saves but that of one file, where several may lie in
    one folder. ``has_set`` returns whether a file of a folder says, by its
    name, to which of several checkpoints there it belongs; ``scan`` heeds ``ScanOptions.user_file``
    then. ``latest`` is how a run says which of its checkpoints is the latest.

    ``names`` are what the files are called without which there is nothing to read. ``found``
    returns a true value if there are some, where ``probe`` asks for more.
    """

    probe: Callable[[Source], object] | None = None
    files: tuple[FileRule, ...] = ()
    suffixes: tuple[str, ...] = ()
    folder: str | None = None
    other_saves: Callable[[Source, str], frozenset[str]] = lambda folder, file: frozenset()
    has_set: Callable[[Source, str], bool] = lambda folder, file: False
    latest: LatestMarker | None = None
    names: str = ""
    found: Callable[[Source], object] | None = None


def by_name(pattern: re.Pattern[str], names: str, latest: LatestMarker | None = None) -> Detection:
    """Return how a format is found of which every file has a name of its own."""
    return Detection(
        lambda source: any(map(pattern.fullmatch, source.files)), latest=latest, names=names
    )


class Reading(Struct, frozen=True):
    """How checkpoints of a format are read.

    ``scan`` reads metadata only and returns the catalog. ``locate`` opens the ``Container`` places
    that ``scan`` left closed, for the tensors of the catalog it is given; None where ``scan``
    leaves none. Where it ``defers``, it may leave some with an ``Opening``. ``recover`` reads what
    is left where the metadata is lost; None if nothing is. ``trim`` returns a tensor without what
    its writer left undefined, such as padding. ``checks`` returns what only this format can tell
    to be wrong, of a catalog that was scanned.

    ``is_possible`` is False if the format is only recognized, to say why it cannot be read.
    ``takes_tp_rules`` and ``takes_world_size`` say that ``scan`` heeds these of ``ScanOptions``.
    """

    scan: Callable[[Source, ScanOptions], Catalog]
    locate: Locate | None = None
    recover: Callable[[Source], Recovery] | None = None
    trim: Callable[[TensorEntry], TensorEntry] | None = None
    checks: Callable[[Source, Catalog], list[Problem]] = lambda source, catalog: []
    is_possible: bool = True
    takes_tp_rules: bool = False
    takes_world_size: bool = False


class Writing(Struct, frozen=True):
    """How checkpoints of a format are written, and what its files have room for.

    ``convert`` lays a whole checkpoint out, ``reshard`` one that is cut for a mesh; None where the
    format is not written so. ``of_ranks`` says that ``convert`` writes the chunks of each rank
    into files of its own, ``has_shards`` that it cuts a model into files of ``max_shard_size``,
    ``has_metadata`` that the files have texts in their headers, as safetensors do; ``has_values``
    is False if they have no place for values that are no tensors.
    ``families`` are the first parts of the names that it has files for, if not of all.
    """

    convert: LayOut | None = None
    reshard: LayOut | None = None
    of_ranks: bool = False
    has_shards: bool = False
    has_metadata: bool = False
    has_values: bool = True
    families: tuple[str, ...] = ()


class Loading(Struct, frozen=True):
    """What whoever loads a checkpoint of a format expects of it.

    ``rules`` returns how the format cuts tensors by their names, where it leaves no choice.
    ``has_rank_state`` says that each rank finds state of its own, such as that of random number
    generators, where ``reshard`` puts what only it has. ``is_model_folder`` says that it is a
    folder which a model is loaded from, with its config.json; ``companions_in`` is the folder
    there that holds config.json, tokenizer and the like. ``config`` says whether a Hugging Face
    config.json must lie beside the tensors; where it is there, it must fit them. None where such a
    file is of no meaning.
    """

    rules: Callable[[], tuple[PlacementRule, ...]] = tuple
    has_rank_state: bool = False
    is_model_folder: bool = False
    companions_in: str = ""
    config: Literal["required", "optional"] | None = None


def refusing(what: str, hint: str) -> Reading:
    """Return the reading of a format that is only recognized: its scan raises this reason."""

    def scan(source: Source, options: ScanOptions) -> Catalog:
        raise Unrecognized(f"{source.root}: {what}", hint=hint)

    return Reading(scan, is_possible=False)


class Format(Struct, frozen=True):
    """One checkpoint format: a row of the registry, and all that commands know of the format."""

    name: str
    summary: str
    detection: Detection
    reading: Reading
    writing: Writing = Writing()
    loading: Loading = Loading()

    def matches(self, source: Source) -> bool:
        """Return whether a source is detected as this format."""
        return self.detection.probe is not None and bool(self.detection.probe(source))

    def scan(self, source: Source, options: ScanOptions) -> Catalog:
        """Read the metadata of a source; Unrecognized if it has none of the format's files.

        A format that was not detected may be forced (``--from``) on any folder.
        """
        names, find = self.detection.names, self.detection.found or self.detection.probe
        if names and find is not None and not find(source):
            hint = "without --from the format is detected"
            raise Unrecognized(f"{source.root}: no file is called {names}", hint=hint)
        return self.reading.scan(source, options)

    def lay_out(self, catalog: Catalog, request: Request) -> Layout:
        """Lay out a catalog whole, or cut for the mesh on which ``request`` places it.

        Raises Unsupported if the format is not written so, or cannot hold what is requested.
        """
        writer = self.writing.convert if request.placed is None else self.writing.reshard
        if writer is None:
            raise Unsupported(
                f"{self.name} is not written here", hint="ckptool formats lists targets"
            )
        return writer(catalog, request)


DELTA = "delta"
"""The key in ``Catalog.info`` of a weight delta."""
EXTRA = ".extra.pt"
"""The suffix of the file for what a safetensors file beside it cannot hold."""
MODEL_EXTRA = f"model{EXTRA}"
"""The file for what none of a model's safetensors files can hold."""
