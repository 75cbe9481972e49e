"""Save what is in memory, in any format that is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Unpack

from ckptool.api.arguments import AnyPath, Keywords, location, with_keywords
from ckptool.api.commands import Progress, started_progress
from ckptool.api.keywords import SaveKeywords
from ckptool.api.state_dict import is_entered, leaves_of
from ckptool.api.tensors import bits_of, global_shape, local_parts, local_tensors, why_not_held
from ckptool.commands.convert import ConvertReport, prepare_save
from ckptool.commands.open import OpenedCheckpoint, no_collecting
from ckptool.commands.options.target import SaveOptions
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
    before it takes its place. A DTensor is written whole where this process holds all of it. Raises
    Unsupported for tensors of which other ranks hold a part, and for values that are not plain
    data; UsageError where it makes no sense.
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
    """Return where a tensor lies in memory; Unsupported where not all of it is there."""
    dtype = BY_NAME.get(str(tensor.dtype).removeprefix("torch."))
    reasons = [why_not_held(tensor), *map(_why_not_plain, local_tensors(tensor))]
    why = next((reason for reason in reasons if reason is not None), None)
    if dtype is None or why is not None:
        kind = f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}"
        raise Unsupported(f"{name}: a {kind}: {why or 'no format has it'}", hint=_TO_SAVE_WHOLE)
    shape = global_shape(tensor)
    chunks = [
        Chunk(box, _place(part, dtype.itemsize, buffers))
        for box, part in local_parts(tensor)
        if box.volume or not tensor.numel()
    ]
    entry = TensorEntry(name, path, dtype, shape, tuple(chunks))
    held = sum(chunk.box.volume for chunk in chunks)
    if held != entry.elements:
        raise Unsupported(
            f"{name}: a {type(tensor).__name__}, of which this process holds {held:,} of"
            f" {entry.elements:,} elements",
            hint=_TO_SAVE_SHARDS,
        )
    return entry


_TO_SAVE_WHOLE = "full_tensor() of a DTensor makes a plain one, dequantize() of a quantized one"
_TO_SAVE_SHARDS = (
    "each rank writes its own with torch.distributed.checkpoint.save(state, checkpoint_id=DIR), and"
    " `ckptool convert DIR DST` makes every other format of it; or save full_tensor() on one rank"
)


def _why_not_plain(tensor: torch.Tensor) -> str | None:
    """Return why a tensor is none of elements in memory, None where it is."""
    import torch

    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        return "not a plain tensor"
    return "it has no memory" if tensor.is_meta else None


def _place(part: torch.Tensor, itemsize: int, buffers: dict[str, memoryview]) -> Extent:
    """Return where a plain tensor lies in memory, among the storages that are seen by now."""
    import torch

    plain = part.cpu().resolve_conj().resolve_neg()
    storage = plain.untyped_storage()
    file = f"storage-{storage.data_ptr():x}-{storage.nbytes()}"
    if file not in buffers:
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        data: Any = bits_of(whole)
        buffers[file] = memoryview(data).cast("B")
    strides = tuple(stride * itemsize for stride in plain.stride())
    return Extent(file, int(plain.storage_offset()) * itemsize, strides)


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
