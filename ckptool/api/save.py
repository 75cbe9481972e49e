"""Save what is in memory, in any format that is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Unpack

from ckptool.api.arguments import AnyPath, Keywords, location, with_keywords
from ckptool.api.commands import Progress, started_progress
from ckptool.api.keywords import SaveKeywords
from ckptool.api.state_dict import is_entered, leaves_of
from ckptool.api.tensors import bits_of
from ckptool.commands.convert import ConvertReport, prepare_save
from ckptool.commands.open import OpenedCheckpoint, no_collecting
from ckptool.commands.options.target import SaveOptions
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, Index, ObjectEntry, Path, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.state_category import with_parts
from ckptool.errors import Unsupported
from ckptool.formats.base import Format
from ckptool.storage.memory import MemoryFiles

if TYPE_CHECKING:
    import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@with_keywords(SaveKeywords)
def save(
    tree: dict[str, Any],
    target: AnyPath,
    *,
    to: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[SaveKeywords],
) -> ConvertReport:
    """Write a state dict from memory in the format ``to`` at ``target``, complete or not at all.

    Through the same layouts as ``convert``; without ``to`` the target's name says it. Tensors that
    share memory are tied where the format can say so. What was written is compared with memory
    before it takes its place. Raises Unsupported for tensors that are not whole here, such as
    DTensors, and for values that are not plain data; UsageError where it makes no sense.
    """
    parsed = Keywords("save", options, SaveKeywords).options(SaveOptions, to=to)
    with no_collecting():
        opened = _opened(tree)
        planned = prepare_save(opened, location(target), parsed)
    return planned.run(started_progress(progress)(planned.nbytes))


def _opened(tree: dict[str, Any]) -> OpenedCheckpoint:
    """Return the state dict as an open checkpoint, each storage of its tensors as a file."""
    import torch

    leaves_of(tree)  # refuses modules, and names that two leaves have
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    buffers: dict[str, memoryview] = {}
    for path, value in _walk((), tree):
        name = ".".join(map(str, path))
        if isinstance(value, torch.Tensor):
            tensors[name] = _entry(name, path, value, buffers)
        else:
            _require_plain(name, value)
            objects[name] = ObjectEntry(name, path, value)
    files = {file: len(data) for file, data in buffers.items()}
    catalog = with_parts(Catalog("memory", tensors, objects, files))
    row = Format("memory", "tensors in memory", None, lambda source, options: catalog)
    return OpenedCheckpoint(FilePath("memory"), MemoryFiles(buffers), row, catalog)


def _walk(path: Path, container: Any) -> Iterator[tuple[Path, Any]]:
    """Yield each leaf with its path, entering what ``load`` enters."""
    is_mapping = isinstance(container, Mapping)
    kind = type(container).__name__
    steps = container.items() if is_mapping else enumerate(container)
    for key, value in steps:
        inner = (*path, key if is_mapping else Index(key, kind))
        if (isinstance(value, Mapping) and value) or is_entered(value):
            yield from _walk(inner, value)
        else:
            yield inner, value


def _entry(
    name: str, path: Path, tensor: torch.Tensor, buffers: dict[str, memoryview]
) -> TensorEntry:
    """Return where a tensor lies in memory; Unsupported where it is not whole and plain there."""
    import torch

    plain = tensor.detach()
    is_plain = type(plain) is torch.Tensor and tensor.layout == torch.strided
    dtype = BY_NAME.get(str(tensor.dtype).removeprefix("torch."))
    if not is_plain or tensor.is_quantized or tensor.is_meta or dtype is None:
        kind = f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}"
        raise Unsupported(
            f"{name}: a {kind}, which is not a whole plain tensor in memory",
            hint="full_tensor() of a DTensor is; torch.distributed.checkpoint.save writes shards",
        )
    plain = plain.cpu().resolve_conj().resolve_neg()
    storage = plain.untyped_storage()
    file = f"storage-{storage.data_ptr():x}-{storage.nbytes()}"
    if file not in buffers:
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        data: Any = bits_of(whole)
        buffers[file] = memoryview(data).cast("B")
    itemsize, shape = dtype.itemsize, tuple(plain.shape)
    strides = tuple(stride * itemsize for stride in plain.stride())
    place = Extent(file, int(plain.storage_offset()) * itemsize, strides)
    return TensorEntry(name, path, dtype, shape, (Chunk(Box.whole(shape), place),))


def _require_plain(name: str, value: object) -> None:
    """Raise Unsupported where ``torch.load(weights_only=True)`` would not load a value."""
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if isinstance(inner, list | tuple | set) and type(value) in (dict, list, tuple, set):
        for part in inner:
            _require_plain(name, part)
    elif type(value) not in _PLAIN:
        raise Unsupported(
            f"{name}: a {type(value).__name__}, which is not plain data",
            hint="numbers, texts, and lists, tuples, sets and dicts of them are",
        )
