"""Whether the numbers in files' names are those of processes, or count something else.

A LoRA adapter has a rank too: ``lora_rank8.pt`` and ``lora_rank16.pt`` are two checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptool.errors import CkptoolError
from ckptool.formats._flat_params import is_flat
from ckptool.formats._leaves import Leaf, PlainLeaf, ShareLeaf, read_leaves
from ckptool.formats._rank_files import RankFile
from ckptool.formats._torch_file import read_torch_file
from ckptool.formats.base import Source

STATES_OF_A_RANK = ("random_states", "rng_state", "extra_state")


def of_processes(source: Source, files: Sequence[RankFile]) -> list[RankFile]:
    """Return the files without the families whose numbers are no ranks of processes."""
    families: dict[str, list[RankFile]] = {}
    for item in files:
        families.setdefault(item.family, []).append(item)
    kept = {name for name, items in families.items() if _are_processes(source, items)}
    return [item for item in files if item.family in kept]


def _are_processes(source: Source, items: Sequence[RankFile]) -> bool:
    """Whether files are of processes, which are counted from 0, or say so in what they hold.

    Without the first one, whole tensors must at least be of one shape in all of them.
    """
    numbers = {item.rank for item in items}
    stated = any(item.world for item in items) or items[0].family.startswith(STATES_OF_A_RANK)
    if stated or 0 in numbers:
        return True
    try:
        contents = [_leaves(source, item.file) for item in items]
    except CkptoolError:
        return True
    if any(_is_part(name, leaf) for leaves in contents for name, leaf in leaves.items()):
        return True
    return 1 in numbers and _are_alike(contents)


def _leaves(source: Source, file: str) -> Mapping[str, Leaf]:
    return read_leaves(read_torch_file(source, file), source, refuse=True)


def _is_part(name: str, leaf: Leaf) -> bool:
    """Whether something is recorded as one process's part of a whole."""
    return isinstance(leaf.value, ShareLeaf) or is_flat(name)


def _are_alike(contents: Sequence[Mapping[str, Leaf]]) -> bool:
    """Whether tensors of one name have the same shape in all files."""
    shapes: dict[str, tuple[int, ...]] = {}
    return all(
        shapes.setdefault(name, leaf.value.tensor.shape) == leaf.value.tensor.shape
        for leaves in contents
        for name, leaf in leaves.items()
        if isinstance(leaf.value, PlainLeaf)
    )
