"""Apply a chain of weight deltas to the weights that it begins with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct

from ckptool.commands.merge.expressions import Computation, Expression, computed
from ckptool.commands.merge.operands import Operand
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.text import list_some, plural
from ckptool.engine.formulas.delta import (
    CHECKSUMS,
    ChangedBits,
    KeptChanges,
    Step,
    box_and_share,
)
from ckptool.engine.formulas.delta_changes import CHANGES
from ckptool.errors import Unsupported, UsageError
from ckptool.formats.safetensors import WeightDelta, read_delta
from ckptool.serialization.safetensors_metadata import without_texts
from ckptool.serialization.source import is_there, parse_json_object, read_metadata

_FEW = 3
_STATE = ".weight_sync/state.json"
"""Where SGLang (01d5bfe5 of 2026-08) notes the version of the weights that it applied deltas to."""
_FULL = re.compile(r"weight_v(\d+)")
"""How slime calls the folder of a version, a full one, too."""
_REACH = 1 << 32
"""Bytes that positions of 32 bits reach."""


class _Link(Struct, frozen=True):
    """A delta of a chain, and what it says of itself."""

    operand: Operand
    delta: WeightDelta

    @property
    def path(self) -> str:
        return str(self.operand.opened.path)


def apply_deltas(base: Operand, deltas: Sequence[Operand]) -> Computation:
    """Compute the tensors that deltas change, one after the other; all others stay.

    Raises Unsupported if the chain has a gap or begins with another version, if a delta is of an
    unknown kind, or changes tensors that the base lacks.
    """
    chain = [_Link(d, read_delta(d.opened.source, d.opened.catalog)) for d in deltas]
    _require_order(base, chain)
    for link in chain:
        _require_known(link)
        _require_tensors(base, link)
    tensors, expressions, changes = dict[str, TensorEntry](), list[Expression](), KeptChanges()
    for name, entry in base.catalog.tensors.items():
        links = [link for link in chain if name in link.operand.catalog.tensors]
        tensors[name] = _change(entry, links, changes) if links else entry
        labels = [link.operand.label for link in links]
        text = f"{base.label} with {list_some(labels, _FEW)}" if labels else base.label
        expressions.append(Expression(name, text))
    catalog = _without_digests(base.catalog, chain).with_tensors(tensors)
    return Computation(catalog, tuple(expressions))


def require_as_stored(options: RewriteOptions) -> None:
    """Raise UsageError for an option that rewrites the tensors that deltas change."""
    selection = options.selection
    values = {
        "--map": options.map.name,
        "--experts": options.map.experts,
        "--dequantize": options.dequantize,
        "--rename": selection.rename,
        "--strip-prefix": selection.strip_prefix,
        "--peft-adapter": selection.peft_adapter,
    }
    for option, value in values.items():
        if value:
            raise UsageError(
                f"{option}: not with --apply-delta, which changes tensors as they are stored",
                hint="convert what it writes",
            )


def _change(entry: TensorEntry, chain: Sequence[_Link], changes: KeptChanges) -> TensorEntry:
    """Return a tensor with the changes of the deltas that change it."""
    nbytes, steps, parts = entry.elements * entry.source_dtype.itemsize, list[Step](), [entry]
    for link in chain:
        delta = link.delta
        if delta.encoding == "overwrite" and nbytes > _REACH:
            raise Unsupported(
                f"{link.path}: {entry.name} has {nbytes:,} bytes, and positions of 32 bits reach"
                f" {_REACH:,}"
            )
        what = f"{link.path}: {entry.name}"
        steps.append(Step(delta.encoding, delta.checksum, delta.digests[entry.name], what))
        parts.append(link.operand.catalog.tensors[entry.name])
    formula = ChangedBits(steps, changes)
    return computed(entry, parts, formula, box_and_share, formula.memory)


def _without_digests(catalog: Catalog, chain: Sequence[_Link]) -> Catalog:
    """Return a catalog without the checksums of tensors that change, as ModelExpress has them."""
    names = {name for link in chain for name in link.operand.catalog.tensors}
    return without_texts(catalog, lambda key, _: key in names)


def _require_known(link: _Link) -> None:
    """Raise Unsupported for a delta that is encoded, compressed or summed in an unknown way."""
    delta = link.delta
    facts = (
        ("delta_encoding", delta.encoding, CHANGES),
        ("compression_format", delta.compression, ("zstd",)),
        ("checksum_format", delta.checksum, CHECKSUMS),
    )
    for key, value, choices in facts:
        if value not in choices:
            raise Unsupported(f"{link.path}: {key} {value!r} is not one of {', '.join(choices)}")
    CHECKSUMS[delta.checksum]()  # its package may be missing


def _require_tensors(base: Operand, link: _Link) -> None:
    """Raise Unsupported if a delta changes tensors that the base lacks."""
    has = base.opened.catalog.tensors
    lacking = [name for name in link.operand.catalog.tensors if name not in has]
    if lacking:
        raise Unsupported(
            f"{link.path}: changes {plural(len(lacking), 'tensor')} that {base.opened.path} lacks:"
            f" {list_some(lacking, _FEW)}",
            hint="--onto names the model whose training wrote the deltas, under its own names",
        )


def _require_order(base: Operand, chain: Sequence[_Link]) -> None:
    """Raise Unsupported unless each delta is of the version that the one before it leaves.

    A base that does not say its version is known by the checksums alone.
    """
    version, path = _version_of(base), str(base.opened.path)
    paths = Counter(link.path for link in chain)
    for link in chain:
        if paths[link.path] > 1:
            raise Unsupported(f"{link.path}: is given twice", hint="give each delta once")
        if _key(link.delta.version) == _key(link.delta.base_version):
            raise Unsupported(f"{link.path}: from version {link.delta.version} to the same version")
        if version is not None and _key(link.delta.base_version) != _key(version):
            raise Unsupported(
                f"{link.path}: from version {link.delta.base_version} to {link.delta.version}, but"
                f" {path} is of version {version}",
                hint=_next_step(chain, version, link),
            )
        version, path = link.delta.version, link.path


def _next_step(chain: Sequence[_Link], version: str, link: _Link) -> str:
    """Return the order in which deltas are a chain, or what is missing before one of them."""
    order = list(_in_order(chain))
    if len(order) == len(chain) and order != list(chain):
        return f"in order they are {' '.join(other.path for other in order)}"
    return f"give what leads from version {version} to {link.delta.base_version} before it"


def _in_order(chain: Sequence[_Link]) -> Iterator[_Link]:
    """Yield deltas from the one that none leads to, each followed by the one from its version."""
    following = {_key(link.delta.base_version): link for link in chain}
    leaves = {_key(link.delta.version) for link in chain}
    version = next((key for key in following if key not in leaves), None)
    while version in following:
        link = following.pop(version)
        yield link
        version = _key(link.delta.version)


def _key(version: str) -> str:
    """Return what two texts for one version have in common: ``1`` and ``000001`` are one."""
    return version.lstrip("0") if version.isdecimal() else version


def _version_of(base: Operand) -> str | None:
    """Return the version of weights that a folder says it has, None if it says none."""
    source, path = base.opened.source, base.opened.path
    if is_there(source, _STATE):
        version = parse_json_object(read_metadata(source, _STATE), _STATE).get("version")
        return None if version is None else str(version)
    names = (path.name, path.parent.name)  # a folder of one file is read as that
    return next((match[1] for match in map(_FULL.fullmatch, names) if match), None)
