"""Save what is in memory, in any format that is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from ckptool.api.arguments import AnyPath, Keywords, location, with_keywords
from ckptool.api.commands import OnProgress
from ckptool.api.keywords import SaveKeywords
from ckptool.api.save_shards import TO_SAVE_SHARDS, open_memory, save_shards
from ckptool.api.state_dict import leaves_of
from ckptool.api.tensors import (
    bits_of,
    find_obstacle,
    global_shape,
    local_parts,
    local_tensors,
)
from ckptool.api.values import SIMPLE
from ckptool.commands.convert import ConvertReport, prepare_save, writer_for
from ckptool.commands.open import OpenedCheckpoint, no_collecting
from ckptool.commands.options.target import SaveOptions
from ckptool.commands.transfer.target import resolve_target
from ckptool.core.catalog import Catalog, Chunk, Extent, ObjectEntry, Path, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.progress import Progress
from ckptool.errors import Unsupported
from ckptool.storage.virtual.memory import MemoryFiles

if TYPE_CHECKING:
    import torch


@with_keywords(SaveKeywords)
def save(
    tree: Mapping[str, Any],
    target: AnyPath,
    *,
    to: str | None = None,
    progress: OnProgress | None = None,
    **options: Unpack[SaveKeywords],
) -> ConvertReport:
    """Write a state dict from memory in the format ``to`` at ``target``, complete or not at all.

    Through the same layouts as ``convert``; without ``to`` the target's name says it. Tensors that
    share memory are tied where the format can say so. What was written is compared with memory
    before it takes its place. In a process group all ranks save together ``to="dcp"``, and
    ``to="dcp-safetensors"``, as by torch's own ``dcp.save``: every rank must call this, and each
    writes what it holds, such as its shards of DTensors. Raises Unsupported if ranks do not, where
    other ranks hold a part and the format has no file per rank, and for values that are not plain
    data; UsageError if it makes no sense; Damaged if ranks contradict one another.
    """
    parsed = Keywords("save", options, SaveKeywords).options(SaveOptions, to=to)
    count, place = Progress(progress), location(target)
    if writer_for(parsed.to, resolve_target(place)).writing.of_ranks and _is_one_of_several():
        return save_shards(lambda rank: _collect(tree, rank), place, parsed, count)
    with no_collecting():
        planned = prepare_save(_open(tree), place, parsed)
    return planned.run(count)


def _is_one_of_several() -> bool:
    """Return whether this process is one of several ranks of a process group."""
    import torch.distributed as distributed

    is_begun = distributed.is_available() and distributed.is_initialized()
    return is_begun and distributed.get_world_size() > 1


def _open(tree: Mapping[str, Any]) -> OpenedCheckpoint:
    """Return the state dict as an open checkpoint, each storage of its tensors as a file."""
    catalog, source = _collect(tree)
    for name, entry in catalog.tensors.items():
        count = sum(chunk.box.volume for chunk in entry.chunks)
        if count != entry.elements:
            raise Unsupported(
                f"{name}: this process holds only a part of its {entry.elements:,} elements",
                hint=TO_SAVE_SHARDS,
            )
    return open_memory(catalog, source)


def _collect(tree: Mapping[str, Any], rank: int = 0) -> tuple[Catalog, MemoryFiles]:
    """Return what this rank holds of a state dict, each storage of its tensors as a file."""
    import torch

    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    buffers: dict[str, memoryview] = {}
    for name, leaf in leaves_of(tree, saved=True).items():
        if isinstance(leaf.value, torch.Tensor):
            tensors[name] = _entry(name, leaf.path, leaf.value, buffers, f"rank-{rank}")
        else:
            is_empty = isinstance(leaf.value, Mapping) and not leaf.value
            value = {} if is_empty else leaf.value
            _require_plain(name, value)
            objects[name] = ObjectEntry(name, leaf.path, value)
    source = MemoryFiles(buffers)
    return Catalog("memory", tensors, objects, dict(source.files)), source


def _entry(
    name: str, path: Path, tensor: torch.Tensor, buffers: dict[str, memoryview], head: str
) -> TensorEntry:
    """Return the entry of what this rank holds of a tensor; Unsupported if it is not in memory.

    ``head`` begins the names of its files.
    """
    dtype = BY_NAME.get(str(tensor.dtype).removeprefix("torch."))
    why = find_obstacle(tensor) or next(
        filter(None, map(_why_not_plain, local_tensors(tensor))), None
    )
    if dtype is None or why is not None:
        kind = f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}"
        raise Unsupported(
            f"{name}: a {kind}: {why or 'no format supports it'}", hint=_TO_SAVE_WHOLE
        )
    shape = global_shape(tensor)
    chunks = [
        Chunk(box, _place(part, dtype.itemsize, buffers, head))
        for box, part in local_parts(tensor)
        if box.volume or not tensor.numel()
    ]
    return TensorEntry(name, path, dtype, shape, tuple(chunks))


_TO_SAVE_WHOLE = "call full_tensor() on a DTensor, dequantize() on a quantized tensor"


def _why_not_plain(tensor: torch.Tensor) -> str | None:
    """Return why a tensor is not an ordinary one in memory; None if it is one."""
    import torch

    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        return "not a plain tensor"
    return "it has no memory" if tensor.is_meta else None


def _place(part: torch.Tensor, itemsize: int, buffers: dict[str, memoryview], head: str) -> Extent:
    """Return where a plain tensor lies in memory, among the storages that are seen by now."""
    import torch

    plain = part.cpu().resolve_conj().resolve_neg()
    storage = plain.untyped_storage()
    file = f"{head}/storage-{storage.data_ptr():x}-{storage.nbytes()}"
    if file not in buffers:
        elements = torch.empty(0, dtype=torch.uint8).set_(storage)
        data: Any = bits_of(elements)
        buffers[file] = memoryview(data).cast("B")
    strides = tuple(stride * itemsize for stride in plain.stride())
    return Extent(file, int(plain.storage_offset()) * itemsize, strides)


def _require_plain(name: str, value: object) -> None:
    """Raise Unsupported if ``torch.load(weights_only=True)`` would not load a value."""
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if isinstance(inner, list | tuple | set) and type(value) in (dict, Counter, list, tuple, set):
        for part in inner:
            _require_plain(name, part)
    elif type(value) not in SIMPLE:
        raise Unsupported(
            f"{name}: a {type(value).__name__}, which is not plain data",
            hint="use numbers, text, and lists, tuples, sets or dicts of them",
        )
