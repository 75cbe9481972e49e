"""Choose the placements of every tensor on a new device mesh, by rules, styles, policies, names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from msgspec import Struct

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.mesh import Mesh, Partial, Placement, Placements, Replicate, Shard, StridedShard
from ckptool.core.selection import meant_by, unmatched
from ckptool.core.sharding.cuts import (
    after_the_later,
    cuts_by_dim,
    encoded_order,
    placements_of,
)
from ckptool.core.sharding.dtensor import LocalShard, local_shards
from ckptool.core.text import plural
from ckptool.errors import Unsupported, UsageError

_MOST_RANKS, _MOST_DIMS = 131_072, 4
"""More than any job has had: the shards of all ranks of a mesh are planned at once."""
_LONGEST = 9
"""Digits of a number of ranks, zeros before it included."""


class PlacementRule(Struct, frozen=True):
    """Tensors whose names match ``glob`` get these placements, or those of a style on ``tp``.

    A ``required`` rule must match something.
    """

    glob: str
    placements: Placements | None = None
    style: str | None = None
    required: bool = True


class Choice(Struct, frozen=True):
    """The placements of one tensor, and the reason they were chosen."""

    placements: Placements
    reason: str


def parse_mesh(text: str) -> Mesh:
    """Return the mesh of ``2x4``, ``8`` or ``dp=2,tp=4``; UsageError if it is invalid."""
    fields = [part.partition("=") for part in text.split(",")] if "=" in text else []
    names = [name.strip() for name, _, _ in fields] or None
    sizes = [size.strip() for _, _, size in fields] or text.strip().lower().split("x")
    problem = _mesh_problem(names, sizes)
    if problem is not None:
        raise UsageError(f"invalid mesh {text.strip()!r}: {problem}", hint=_MESHES)
    return Mesh.of([int(size) for size in sizes], names)


_MESHES = "such as 8, 2x4 or dp=2,tp=4"


def _mesh_problem(names: Sequence[str] | None, sizes: Sequence[str]) -> str | None:
    """Return what is wrong with the names and sizes of a mesh's dims, None if nothing is."""
    for name, size in zip(names or sizes, sizes, strict=True):
        if not size or not name:
            return f"the dim {name!r} has no size" if name else "a dim has no name or size"
        if not size.isdecimal():
            return f"{size!r} is not a number of ranks"
        if int(size[:10]) == 0:
            return "a dim has at least 1 rank"
    if names is not None and len(set(names)) != len(names):
        return "each dim needs its own name"
    if len(sizes) > _MOST_DIMS:
        return f"{len(sizes)} dims, more than {_MOST_DIMS}"
    if any(len(size) > _LONGEST for size in sizes) or math.prod(map(int, sizes)) > _MOST_RANKS:
        return f"more than {_MOST_RANKS:,} ranks"
    return None


_PLACEMENTS = "Shard(0), StridedShard(0, 2) or Replicate() for each dim, or colwise or rowwise"
_NUMBER = r"\s*(-?[0-9]{1,9})\s*"
_SHARD = re.compile(rf"_?shard\s*\({_NUMBER}\)", re.IGNORECASE)
_STRIDED = re.compile(rf"_?stridedshard\s*\({_NUMBER},{_NUMBER}\)", re.IGNORECASE)
_REPLICATE = re.compile(r"_?replicate\s*(?:\(\s*\))?", re.IGNORECASE)
_PARTIAL = re.compile(r"_?partial\b.*", re.IGNORECASE)


def parse_placement(text: str) -> Placement:
    """Return the placement written as ``Shard(0)``, ``StridedShard(0, 2)`` or ``Replicate()``."""
    text = text.strip()
    if match := _SHARD.fullmatch(text):
        return Shard(int(match[1]))
    if (match := _STRIDED.fullmatch(text)) and int(match[2]) > 0:
        return StridedShard(int(match[1]), int(match[2]))
    if _REPLICATE.fullmatch(text):
        return Replicate()
    if _PARTIAL.fullmatch(text):
        raise UsageError(f"{text!r}: each rank would hold an addend, not the values")
    raise UsageError(f"{text!r} is not a placement", hint=_PLACEMENTS)


def parse_rule(text: str) -> PlacementRule:
    """Return the rule ``NAME=Shard(0),Replicate()`` or ``NAME=colwise``.

    Raises UsageError if it is invalid.
    """
    glob, equals, right = text.partition("=")
    if not equals or not glob.strip():
        raise UsageError(
            f"--shard {text!r} is not NAME=PLACEMENTS", hint="such as '*.weight=Shard(0)'"
        )
    return rule_of(glob.strip(), split_placements(right))


def rule_of(glob: str, placements: Sequence[str]) -> PlacementRule:
    """Return a rule from a glob and its placements in words, one per mesh dim, or one style."""
    if len(placements) == 1 and placements[0].strip() in STYLES:
        return PlacementRule(glob, style=placements[0].strip())
    return PlacementRule(glob, placements=tuple(map(parse_placement, placements)))


def split_placements(text: str) -> list[str]:
    """Return the parts of a list of placements, split at the commas between them."""
    return re.split(r",(?![^(]*\))", text)


class Placer(Struct, frozen=True):
    """Chooses placements on ``mesh``: by rule, policy, the source's own, dim names, or fsdp."""

    mesh: Mesh
    rules: tuple[PlacementRule, ...] = ()
    policy: str | None = None

    def choose(self, catalog: Catalog) -> dict[str, Choice]:
        """Return a choice for every tensor; UsageError if a rule does not fit mesh or tensor."""
        rules = [(meant_by([rule.glob], catalog.tensors), rule) for rule in self.rules]
        for is_meant, rule in rules:
            if rule.required and not any(map(is_meant, catalog.tensors)):
                raise unmatched("the rule", rule.glob, catalog.tensors, "tensor")
        chosen = {}
        for name, entry in catalog.tensors.items():
            first = next((rule for is_meant, rule in rules if entry.shape and is_meant(name)), None)
            chosen[name] = self._choose(entry, catalog, first)
        for name, choice in chosen.items():
            _require_fit(catalog.tensors[name], choice.placements)
        return chosen

    def _choose(self, entry: TensorEntry, catalog: Catalog, rule: PlacementRule | None) -> Choice:
        if rule is not None:
            return Choice(self._by_rule(rule, entry), f"rule {rule.glob}")
        if entry.placements is None and catalog.mesh_source == "declared":
            return Choice(replicate(entry, self.mesh), "plain, the same on every rank")
        if self.policy is not None:
            return Choice(POLICIES[self.policy](entry, self.mesh), f"policy {self.policy}")
        placements = self._keep(entry, catalog)
        if placements is not None:
            return Choice(placements, "kept from the source")
        if is_conventional(self.mesh):
            return Choice(self._by_dim_names(entry), "mesh dim names")
        return Choice(fsdp(entry, self.mesh), "policy fsdp, the default")

    def _by_rule(self, rule: PlacementRule, entry: TensorEntry) -> Placements:
        if rule.style is not None:
            return self._by_style(rule.style, entry)
        placements = rule.placements or ()
        if len(placements) != len(self.mesh.shape):
            raise UsageError(
                f"the rule {rule.glob!r} has {plural(len(placements), 'placement')}, the mesh"
                f" {'x'.join(map(str, self.mesh.shape))} has {plural(len(self.mesh.shape), 'dim')}",
                hint="one for each dim of the mesh, such as Shard(0),Replicate()",
            )
        return placements

    def _by_style(self, style: str, entry: TensorEntry) -> Placements:
        """Return the style on the ``tp`` dim (else the last); the other dims as their names say."""
        names = self.mesh.names or ()
        tp = names.index("tp") if "tp" in names else len(self.mesh.shape) - 1
        placed = [
            by_dim_name(names[dim] if names else "fsdp", entry)
            for dim in range(len(self.mesh.shape))
        ]
        dim = STYLES[style]
        placed[tp] = Replicate() if dim is None or len(entry.shape) <= dim else Shard(dim)
        return fsdp_last(tuple(placed), self.mesh, {tp})

    def _by_dim_names(self, entry: TensorEntry) -> Placements:
        names = self.mesh.names or ()
        if "tp" in names:
            return self._by_style(conventional_style(entry.name), entry)
        placed = tuple(by_dim_name(name, entry) for name in names)
        return fsdp_last(placed, self.mesh, {at for at, name in enumerate(names) if name == "ep"})

    def _keep(self, entry: TensorEntry, catalog: Catalog) -> Placements | None:
        """Carry the source's placements over by dim name or, with as many dims, by position."""
        source = entry.mesh or catalog.mesh
        if entry.placements is None or source is None:
            return None
        if any(isinstance(p, Partial) for p in entry.placements):
            raise Unsupported(f"{entry.name}: partial values cannot be placed")
        places = _places(source, self.mesh)
        return None if places is None else _carry(entry, source, self.mesh, places)


def _places(source: Mesh, mesh: Mesh) -> tuple[int, ...] | None:
    """Return the new mesh's dim for each of the source's; None if that is unknown."""
    if source.names and mesh.names and set(source.names) <= set(mesh.names):
        return tuple(map(mesh.names.index, source.names))
    return tuple(range(len(mesh.shape))) if len(source.shape) == len(mesh.shape) else None


def _carry(entry: TensorEntry, source: Mesh, mesh: Mesh, places: tuple[int, ...]) -> Placements:
    """Return the source's placements on the new mesh, whose dims cut in the same order.

    Split factors that encode no order stay on a mesh of the same shape; else strided shards cut
    after the later dims, as FSDP2's do.
    """
    placements = entry.placements or ()
    if source.shape == mesh.shape and places == tuple(range(len(mesh.shape))):
        return placements
    cuts = cuts_by_dim(len(entry.shape), source.shape, placements)
    orders = [encoded_order(one) or after_the_later(one) for one in cuts]
    return placements_of([[places[cut.mesh_dim] for cut in one] for one in orders], mesh.shape)


def _require_fit(entry: TensorEntry, placements: Placements) -> None:
    for placement in placements:
        dim = getattr(placement, "dim", None)
        if dim is not None and not -len(entry.shape) <= dim < len(entry.shape):
            raise UsageError(
                f"{entry.name}: {placement} does not fit its shape {list(entry.shape)}",
                hint=f"its dims are {', '.join(map(str, range(len(entry.shape))))}",
            )


class PlacedTensors(Struct, frozen=True):
    """A checkpoint's tensors on a new mesh: the placements of each, by name."""

    mesh: Mesh
    placements: dict[str, Placements]

    def shards(self, entry: TensorEntry) -> tuple[LocalShard, ...]:
        """Return what each row-major mesh position holds of a tensor."""
        return local_shards(entry.shape, self.mesh.shape, self.placements[entry.name])


_REPLICATING_DIMS = ("dp_replicate", "replicate", "pp")
_SHARDING_DIMS = ("fsdp", "dp_shard", "dp", "shard", "cp", "dp_cp", "dp_shard_cp")


STYLES = {
    "colwise": 0,
    "rowwise": 1,
    "colwise_rep": 0,
    "colwise_gather_output": 0,
    "rowwise_rep": 1,
    "rowwise_split_input": 1,
    "local_colwise": 0,
    "local_rowwise": 1,
    "sequence_parallel": None,
    "replicated_with_grad_allreduce": None,
    "replicate": None,
}
"""The words of transformers' ``tp_plan`` (transformers 5), and the dim that each shards.

0 are a layer's output features, in weight and bias, 1 the input features, only in the weight.
"""

_COLWISE = re.compile(
    r"(.*\.)?(wq|wk|wv|w1|w3|q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)"
)
_ROWWISE = re.compile(r"(.*\.)?(wo|w2|o_proj|down_proj)\.(weight|bias)")
_VOCABULARY = re.compile(r"(.*\.)?(tok_embeddings|embed_tokens|output|lm_head|wte)\.weight")


def conventional_style(name: str) -> str:
    """Return how tensor parallelism shards a parameter of a Llama-like model, by its usual name."""
    stem = re.sub(r"\.(exp_avg|exp_avg_sq|max_exp_avg_sq)$", "", name)
    if _COLWISE.fullmatch(stem) or _VOCABULARY.fullmatch(stem):
        return "colwise"
    return "rowwise" if _ROWWISE.fullmatch(stem) else "replicate"


def fsdp(entry: TensorEntry, mesh: Mesh) -> Placements:
    """Shard rows over all mesh dims, nested from left to right."""
    return (Shard(0) if entry.shape else Replicate(),) * len(mesh.shape)


def hsdp(entry: TensorEntry, mesh: Mesh) -> Placements:
    """Replicate along the first mesh dim, shard rows over the others."""
    return (Replicate(), *fsdp(entry, mesh)[1:])


def replicate(entry: TensorEntry, mesh: Mesh) -> Placements:
    """Put the whole tensor on every rank."""
    return (Replicate(),) * len(mesh.shape)


POLICIES: dict[str, Callable[[TensorEntry, Mesh], Placements]] = {
    "fsdp": fsdp,
    "hsdp": hsdp,
    "replicate": replicate,
}


def fsdp_last(placements: Placements, mesh: Mesh, first: set[int]) -> Placements:
    """Make FSDP cut what the mesh dims ``first`` (tensor or expert parallel) left of a tensor dim.

    Its shards of the same dim, listed before theirs, become strided.
    """
    adjusted = list(placements)
    for at, placement in enumerate(placements):
        factor = math.prod(mesh.shape[f] for f in first if f > at and placements[f] == placement)
        if at not in first and isinstance(placement, Shard) and factor > 1:
            adjusted[at] = StridedShard(placement.dim, factor)
    return tuple(adjusted)


def is_conventional(mesh: Mesh) -> bool:
    """Return whether all of the mesh's dims have names that say what they do."""
    names = (*_REPLICATING_DIMS, *_SHARDING_DIMS, "tp", "ep")
    return mesh.names is not None and all(name in names for name in mesh.names)


def by_dim_name(name: str, entry: TensorEntry) -> Placement:
    """Return what a conventional mesh dim (torchtitan 0.3) does to a parameter."""
    if name == "ep":
        return Shard(0) if ".experts." in entry.name and len(entry.shape) > 2 else Replicate()
    return Shard(0) if name in _SHARDING_DIMS and entry.shape else Replicate()
