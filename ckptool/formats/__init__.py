"""The checkpoint formats that ckptool knows: one row each, metadata only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ckptool.errors import UsageError
from ckptool.formats.base import FileRule, Format
from ckptool.serialization.source import Source

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


PLUGINS = "CKPTOOL_PLUGINS"
"""The environment variable that enables installed formats of other packages if it is 1."""


class Registry(Mapping[str, Format]):
    """Formats by name, each imported on first use.

    ``places`` maps names to ``module.attribute`` below this package. A command pays only for the
    formats it meets. Installed packages add formats by entry points of the group
    ``ckptool.formats``, which come first, if ``PLUGINS`` enables them: a plug-in is code.
    """

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places
        self._added: dict[str, Format] = {}

    def add(self, row: Format) -> None:
        """Add a format in this process, before all others."""
        if row.name in self._places and self[row.name] is not row:
            raise UsageError(f"ckptool has a format {row.name!r} itself")
        if row.name not in self._places:
            self._added[row.name] = row

    @cached_property
    def _plugins(self) -> dict[str, EntryPoint]:
        if os.environ.get(PLUGINS) != "1":
            return {}
        from importlib.metadata import entry_points

        points = {point.name: point for point in entry_points(group="ckptool.formats")}
        for name in points.keys() & self._places.keys():
            raise UsageError(f"plug-in {points[name].value}: ckptool has a format {name!r} itself")
        return points

    def __getitem__(self, name: str) -> Format:
        if name in self._added:
            return self._added[name]
        if name in self._plugins:
            return _load_plugin(self._plugins[name])
        module, _, attribute = self._places[name].rpartition(".")
        row: Format = getattr(import_module(f"{__name__}.{module}"), attribute)
        return row

    def built_in(self) -> Iterator[Format]:
        """Yield the formats of this package."""
        return (self[name] for name in self._places)

    def of_others(self) -> Iterator[Format]:
        """Yield the formats of other packages."""
        return (self[name] for name in (*self._added, *self._plugins))

    def __iter__(self) -> Iterator[str]:
        return iter((*self._added, *self._plugins, *self._places))

    def __len__(self) -> int:
        return len(self._added) + len(self._plugins) + len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._added or name in self._plugins or name in self._places


def _load_plugin(point: EntryPoint) -> Format:
    """Return the format of a plug-in; UsageError if it is not a Format of its entry's name."""
    try:
        row = point.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"plug-in {point.value}: {error}", hint=f"{PLUGINS}=0 leaves it out"
        ) from None
    if not isinstance(row, Format) or row.name != point.name:
        raise UsageError(f"plug-in {point.value}: not a Format of the name {point.name!r}")
    return row


FORMATS = Registry(
    {
        "bytecheckpoint": "bytecheckpoint.FORMAT",
        "megatron-torch_dist": "megatron.TORCH_DIST_FORMAT",
        "megatron-fsdp_dtensor": "megatron.FSDP_DTENSOR_FORMAT",
        "dcp": "dcp.FORMAT",
        "deepspeed-universal": "deepspeed.UNIVERSAL_FORMAT",
        "deepspeed": "deepspeed.FORMAT",
        "accelerate": "rank_files.accelerate.FORMAT",
        "torchsnapshot": "torchsnapshot.FORMAT",
        "dcp-safetensors": "safetensors.dcp_shards.FORMAT",
        "sharded-state": "vllm.FORMAT",
        "diffusers": "safetensors.diffusers.FORMAT",
        "hf": "safetensors.huggingface.FORMAT",
        "llama": "llama.FORMAT",
        "megatron-torch": "megatron.TORCH_FORMAT",
        "nvrx-local": "megatron.LOCAL_FORMAT",
        "rank-local": "rank_files.FORMAT",
        "safetensors": "safetensors.FORMAT",
        "torch-save": "torch_save.FORMAT",
        "orbax": "orbax.FORMAT",
        "nanotron": "safetensors.nanotron.FORMAT",
        "verl": "rank_files.VERL_FORMAT",
        "torch-checkpointing": "rank_files.TORCH_CHECKPOINTING_FORMAT",
    }
)
"""Most specific first: the first format that matches a source is its format."""
SINGLE_FILES = ("safetensors", "torch-save")
"""Those of them whose checkpoints are single files, known without importing all."""
LATEST = ("latest", "latest_checkpointed_iteration.txt")
"""The files of their ``LatestMarker``s."""


def detect(source: Source) -> Format | None:
    """Return the format of a source, or None if it is unknown."""
    return next((row for row in FORMATS.values() if row.matches(source)), None)


def targets(*, mesh: bool = False) -> dict[str, Format]:
    """Return the formats that are written, by name: whole ones, or those cut for a mesh."""
    rows = FORMATS.values()
    return {
        row.name: row
        for row in rows
        if (row.writing.reshard if mesh else row.writing.convert) is not None
    }


def file_rule(row: Format | None, file: str) -> FileRule | None:
    """Return the rule for a file of its own format, or else of any of ckptool's; or None."""
    rules = row.detection.files if row else ()
    return next((rule for rule in rules if rule.matches(file)), None) or _shared_rule(file)


@lru_cache(maxsize=1 << 16)
def _shared_rule(file: str) -> FileRule | None:
    # another package's rules are for its own checkpoints: they must not end checks of ours
    rules = (rule for row in FORMATS.built_in() for rule in row.detection.files)
    return next((rule for rule in rules if rule.matches(file)), None)


@cache
def latest_markers() -> frozenset[str]:
    """Return the names of the files by which trainers say what a run's latest checkpoint is."""
    rows = FORMATS.of_others()
    return frozenset(
        (*LATEST, *(row.detection.latest.file for row in rows if row.detection.latest is not None))
    )


@cache
def single_file_suffixes() -> dict[str, Format]:
    """Return the single-file formats, by the suffixes of their files."""
    rows = (*FORMATS.of_others(), *(FORMATS[name] for name in SINGLE_FILES))
    return {suffix: row for row in rows for suffix in row.detection.suffixes}


class KnownFormat(NamedTuple):
    """A format: whether it is read, and written by convert and by reshard."""

    name: str
    reads: bool
    converts: bool
    reshards: bool
    summary: str


def list_formats() -> tuple[KnownFormat, ...]:
    """Return every format: whether it is read, and written by ``convert`` and by ``reshard``."""
    return tuple(
        KnownFormat(
            row.name,
            row.reading.is_possible,
            row.writing.convert is not None,
            row.writing.reshard is not None,
            row.summary,
        )
        for row in FORMATS.values()
    )
