"""Rank files of FSDP1's LOCAL_STATE_DICT: flat parameters, and the pieces that lie in them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ckptool.core.catalog import Path, TensorEntry, flat_name
from ckptool.errors import Problem
from ckptool.formats.base import ScanOptions
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.flat_params import Member, is_flat, members_of, taken_apart
from ckptool.serialization.state_dict.leaves import Assembled, PlainLeaf, RankLeaves


def assembled(ranks: Mapping[int, RankLeaves], options: ScanOptions) -> Assembled:
    """The ranks' values merged; FSDP1's flat parameters taken apart where their make-up is given.

    With ``use_orig_params`` the files also hold each rank's piece of each parameter. It lies in
    the flat one and says nothing more, but its length must be what is expected there.
    """
    if not options.flat_params:
        return assemble(ranks, per_rank=options.per_rank)
    names = dict.fromkeys(name for leaves in ranks.values() for name in leaves if is_flat(name))
    only = {r: {n: leaf for n, leaf in all_.items() if n in names} for r, all_ in ranks.items()}
    flats = assemble(only).tensors
    members = [m for found in members_of(flats, options.flat_params).items() for m in _each(*found)]
    inner = {flat_name(member.path): (flat, member) for flat, member in members}
    tied = _tied(ranks, inner)
    members += [(inner[name][0], replace(inner[name][1], path=path)) for path, name in tied.items()]
    known = {*names, *inner, *map(flat_name, tied)}
    rest = {
        rank: {name: leaf for name, leaf in leaves.items() if name not in known}
        for rank, leaves in ranks.items()
    }
    result = assemble(rest, per_rank=options.per_rank)
    result.problems += _wrong_pieces(ranks, flats, members)
    for flat, member in members:
        for entry in taken_apart(flats[flat], [member]):
            result.tensors[entry.name] = entry
    return result


def _tied(ranks: Mapping[int, RankLeaves], inner: Collection[str]) -> dict[Path, str]:
    """Further names of members: on every rank the very bytes of the member's piece."""
    found: dict[Path, set[str]] = {}
    for leaves in ranks.values():
        pieces = {
            leaf.value.place: name
            for name, leaf in leaves.items()
            if name in inner and isinstance(leaf.value, PlainLeaf) and _elements(leaf.value)
        }
        for name, leaf in leaves.items():
            if name not in inner and isinstance(leaf.value, PlainLeaf) and _elements(leaf.value):
                found.setdefault(leaf.path, set()).add(pieces.get(leaf.value.place, ""))
    return {
        path: min(names) for path, names in found.items() if len(names) == 1 and "" not in names
    }


def _elements(leaf: PlainLeaf) -> int:
    return math.prod(leaf.tensor.shape)


def _each(flat: str, members: Iterable[Member]) -> Iterator[tuple[str, Member]]:
    return ((flat, member) for member in members)


def _wrong_pieces(
    ranks: Mapping[int, RankLeaves],
    flats: Mapping[str, TensorEntry],
    members: Iterable[tuple[str, Member]],
) -> Iterator[Problem]:
    """Pieces of parameters that are longer or shorter than the flat parameter says."""
    for flat, member in members:
        name = flat_name(member.path)
        for chunk in flats[flat].chunks:
            leaf = ranks.get(chunk.rank or 0, {}).get(name)
            if leaf is None or not isinstance(leaf.value, PlainLeaf):
                continue
            low, high = max(chunk.box.lo[0], member.start), min(chunk.box.hi[0], member.stop)
            held = _elements(leaf.value)
            if held != max(0, high - low):
                message = f"{name}: rank {chunk.rank} has {held:,} elements of it, by --flat-params"
                message += f" it should have {max(0, high - low):,}"
                yield Problem(message, "sharding-unknown", tensor=name)
