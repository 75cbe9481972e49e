"""Every format that ckptool reads, for ``torch.distributed.checkpoint.load``. Needs torch.

    import torch.distributed.checkpoint as dcp
    from ckptool.dcp import CheckpointReader

    dcp.load(state_dict, storage_reader=CheckpointReader("runs/global_step1000"))

Written against ``torch.distributed.checkpoint`` of torch 2.2 to 2.13: torch's planner decides what
each rank needs, and only the bytes of that are read.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptool.api.arguments import AnyPath, Keywords, location, with_keywords
from ckptool.api.checkpoint import Checkpoint, checkpoint_at, open
from ckptool.api.keywords import OpenKeywords
from ckptool.api.load import Target, cast_hint, dtype_of, fill_targets
from ckptool.api.state_dict import keys_differ, loadable, match_names
from ckptool.api.tensors import torch_dtype, why_not_filled
from ckptool.api.values import archive
from ckptool.commands.detect import holds_checkpoint
from ckptool.commands.open import no_collecting
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Index, Path, TensorEntry
from ckptool.errors import Unsupported

__all__ = ["CheckpointReader"]


class CheckpointReader(StorageReader):
    """Reads any checkpoint for torch's own planners, onto any mesh.

    ``options`` are those of ``ckptool.open``; an open checkpoint can be given instead. Names are
    the catalog's, as ``ckptool inspect`` shows them. Every tensor is one chunk in the metadata: its
    boxes are found in the source's own chunks, and only their bytes are read, by several threads. A
    value is rebuilt only if it is plain data; requesting another raises Unsupported. ``cast`` casts
    floating tensors to the types in the state dict, which torch's reader does by default.
    """

    @with_keywords(OpenKeywords)
    def __init__(
        self,
        path: AnyPath | Checkpoint,
        *,
        cast: bool = False,
        workers: int | None = None,
        **options: Unpack[OpenKeywords],
    ) -> None:
        super().__init__()
        Keywords("CheckpointReader", options, OpenKeywords)
        self._cast = cast
        self._workers = workers
        self._options = options
        self._checkpoint: Checkpoint | None = None
        self._flattened: Catalog | None = None
        self._path: AnyPath = str(path.path) if isinstance(path, Checkpoint) else path
        if isinstance(path, Checkpoint):
            self._checkpoint = checkpoint_at(path, **options)

    @property
    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint on first use, and return it."""
        if self._checkpoint is None:
            self._checkpoint = open(self._path, **self._options)
        return self._checkpoint

    @property
    def _catalog(self) -> Catalog:
        """Return what is in the checkpoint, as torch flattens it."""
        if self._flattened is None:
            self._flattened = loadable(self.checkpoint)
        return self._flattened

    @property
    def checkpoint_id(self) -> AnyPath:
        """Return the checkpoint's path."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint of a known format is there."""
        return holds_checkpoint(location(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over, with another path if one is given."""
        if checkpoint_id is not None and os.fspath(checkpoint_id) != os.fspath(self._path):
            self._path, self._checkpoint, self._flattened = checkpoint_id, None, None

    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:
        """Describe the checkpoint to torch's planners; no tensor byte is read.

        torch 2.13 asks again for the metadata of one rank if there is a parameter ``kwargs``.
        """
        catalog = self._catalog
        entries = _Entries({n: _describe(entry) for n, entry in catalog.tensors.items()})
        entries |= {name: BytesStorageMetadata() for name in catalog.objects}
        entries.checkpoint = self.checkpoint
        paths = {n: _path(entry.path) for n, entry in (catalog.tensors | catalog.objects).items()}
        return Metadata(entries, planner_data=paths, storage_data={})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Set up nothing: every rank reads for itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors that the plan requests; complete when it returns.

        Raises Unsupported for a value that is not plain data, an element type other than the
        checkpoint's, and memory that cannot be filled; Damaged if bytes are not as written, or
        ranks contradict one another on a requested tensor.
        """
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        objects = self._catalog.objects
        archives = [(item, archive(objects[item.storage_index.fqn])) for item in values]
        self._read_tensors(tensors, planner)
        for item, data in archives:
            planner.load_bytes(item, io.BytesIO(data))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensors(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        with no_collecting():
            tensors = [planner.resolve_tensor(item).detach() for item in items]
            targets = list(map(self._target, items, tensors))
        fill_targets(self.checkpoint, targets, self._workers)
        for item, tensor in zip(items, tensors, strict=True):
            planner.commit_tensor(item, tensor)

    def _target(self, item: ReadItem, tensor: torch.Tensor) -> Target:
        cast_type = dtype_of(tensor) if self._cast else None
        entry = self.checkpoint.entry(item.storage_index.fqn, cast_type)
        box = Box.at(item.storage_offsets, item.lengths)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if (dtype, shape) != (entry.dtype.name, box.shape):
            raise Unsupported(
                f"{entry.name} {box}: {entry.dtype} {list(box.shape)} in the checkpoint, {dtype}"
                f" {list(shape)} in the state dict",
                hint=cast_hint(entry, dtype),
            )
        obstacle = why_not_filled(tensor)
        if obstacle is not None:
            raise Unsupported(f"{entry.name}: {obstacle}")
        return Target(entry, box, tensor)


class _Entries(dict[str, Any]):
    """The entries of a checkpoint's metadata; a missing one is reported in ckptool's words.

    torch's planner (2.2 to 2.13) looks up each name of the state dict, and its error only says that
    the name is missing. Only the planner knows whether it continues without
    (``allow_partial_load``): a local variable of the function that looks it up says so; without
    that variable torch's own message is kept.
    """

    checkpoint: Checkpoint

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        looking = sys._getframe(1)
        if looking.f_code.co_name == _LOOKS_FOR_NAMES and looking.f_locals.get("strict"):
            names = looking.f_locals["state_dict"]
            if name in self.checkpoint.catalog.conflicts:
                self.checkpoint.entry(str(name))  # raises why it cannot be read
            raise keys_differ(self.checkpoint, match_names(self.checkpoint, names), _LENIENT)
        return False


_LOOKS_FOR_NAMES = "create_default_local_load_plan"
_LENIENT = "planner=DefaultLoadPlanner(allow_partial_load=True)"


def _describe(entry: TensorEntry) -> TensorStorageMetadata:
    shape = torch.Size(entry.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(torch_dtype(entry.dtype.name)), shape, [whole])


def _path(path: Path) -> tuple[str | int, ...]:
    return tuple(step.position if isinstance(step, Index) else str(step) for step in path)
