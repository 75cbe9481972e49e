"""Unflatten FSDP1's flat parameters.

A flat parameter is one tensor of one dim in which the parameters of an FSDP unit lie end to end,
row-major, in the order of ``named_parameters()``. It is called ``_flat_param`` below the unit's
name. With ``use_orig_params`` each parameter begins at a multiple of 16 bytes, and the end is
padded to a multiple of the ranks (``FlatParamHandle``, torch 2.1 to 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Path, TensorEntry, flat_name
from ckptool.core.views import narrow, split_dim
from ckptool.errors import Damaged, Unsupported

FLAT = "_flat_param"
_ALIGNMENT = 16

Parameters = Sequence[tuple[str, tuple[int, ...]]]
"""The model's parameters with their shapes, in the order of ``named_parameters()``."""

HINT = (
    "use --flat-params FILE, which the training code writes by: json.dump({n: p.shape for n, p in"
    " model.named_parameters()}, open(FILE, 'w'))"
)


class Member(Struct, frozen=True):
    """A parameter in a flat one, and the element at which it begins there."""

    path: Path
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def is_flat(name: str) -> bool:
    """Return whether a tensor of this name is a flat parameter."""
    return name.rpartition(".")[2] == FLAT


def find_members(
    flats: Mapping[str, TensorEntry], parameters: Parameters
) -> dict[str, list[Member]]:
    """Return the members of each flat parameter, by the model's parameters.

    A parameter belongs to the innermost unit that contains its name. Raises Unsupported if the
    parameters of a unit do not fill its flat parameter.
    """
    heads = {name.removesuffix(FLAT): name for name in flats}
    prefix = _find_prefix(heads, parameters)
    owned: dict[str, list[tuple[str, tuple[int, ...]]]] = {name: [] for name in flats}
    for short, shape in parameters:
        name = prefix + short
        inside = [head for head in heads if name.startswith(head)]
        if not inside:
            units = sorted(heads)[:8]
            raise Unsupported(f"--flat-params: {short} belongs to none of the FSDP units {units}")
        owned[heads[max(inside, key=len)]].append((name, shape))
    return {name: _find_layout(flats[name], parts) for name, parts in owned.items()}


def _find_prefix(heads: Iterable[str], parameters: Parameters) -> str:
    """Return the prefix of the model's own names: nothing, or the file's family."""
    first = {head.partition(".")[0] + "." for head in heads if "." in head}
    for prefix in ("", *sorted(first)):
        if all(any((prefix + name).startswith(head) for name, _ in parameters) for head in heads):
            return prefix
    return ""


def _find_layout(flat: TensorEntry, parts: Parameters) -> list[Member]:
    """Return the members end to end, or aligned, whichever fills the flat parameter."""
    plain = _lay_end_to_end(parts, 1)
    if plain and plain[-1].stop == flat.elements:
        return plain
    aligned = _lay_end_to_end(parts, _ALIGNMENT // flat.source_dtype.itemsize)
    if aligned and 0 <= flat.elements - aligned[-1].stop < len(flat.chunks):
        return aligned
    end = f"{plain[-1].stop:,} elements, {aligned[-1].stop:,} aligned" if plain else "none"
    raise Unsupported(
        f"--flat-params: {flat.name} has {flat.elements:,} elements, the {len(parts)} parameters"
        f" of its FSDP unit have {end}",
        hint="list all parameters of the model by its own names, in the order of its modules",
    )


def _lay_end_to_end(parts: Parameters, step: int) -> list[Member]:
    members: list[Member] = []
    position = 0
    for name, shape in parts:
        position = -(-position // step) * step
        members.append(Member((name,), shape, position))
        position = members[-1].stop
    return members


def unflatten(flat: TensorEntry, members: Iterable[Member]) -> Iterator[TensorEntry]:
    """Yield each member as a separate tensor, if some of its elements are stored.

    Raises Damaged if a member ends outside the flat parameter, or that does not have one dim.
    """
    if len(flat.shape) != 1:
        raise Damaged(f"{flat.name}: a flat parameter of {len(flat.shape)} dims")
    for member in members:
        if not 0 <= member.start <= member.stop <= flat.shape[0]:
            raise Damaged(
                f"{flat_name(member.path)}: elements {member.start:,} to {member.stop:,} of"
                f" {flat.name}, which has {flat.shape[0]:,}"
            )
        part = split_dim(narrow(flat, 0, member.start, member.stop), 0, member.shape)
        if part.chunks or member.start == member.stop:
            yield replace(part, name=flat_name(member.path), path=member.path)
