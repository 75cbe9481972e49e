"""The models of two checkpoints under common names, whatever their trainers, formats and shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from ckptool.commands.model.architectures import is_tied
from ckptool.commands.model.records import CONFIG, records
from ckptool.commands.open import OpenedCheckpoint, require_sound
from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.rewrite import dequantized, only_model, rewrite
from ckptool.commands.verify.compare.fit import Candidate, find_rewriting, mapped
from ckptool.core.catalog import Catalog, TensorEntry, tied_names
from ckptool.core.quantization.master_names import NORMS
from ckptool.core.quantization.names import is_plain
from ckptool.core.selection import rename_entry, split_stacked
from ckptool.core.state_category import state_category
from ckptool.core.views import join
from ckptool.errors import CkptoolError, UsageError
from ckptool.storage.place import on_disk

_MODEL = RewriteOptions(Selection(model_only=True))


class LineUp(NamedTuple):
    """Two models under common names, and ``how`` one of them got these, if it had others.

    ``ties`` are names that are one tensor.
    """

    mine: Catalog
    theirs: Catalog
    how: str
    ties: list[tuple[str, ...]]

    @property
    def common(self) -> list[str]:
        """Return the names that both have."""
        return [name for name in self.mine.tensors if name in self.theirs.tensors]

    @property
    def likeness(self) -> float:
        """Return how much of both is common, from 0 to 1."""
        both = len(self.mine.tensors) + len(self.theirs.tensors)
        return 2 * len(self.common) / max(1, both)

    @property
    def is_unlike(self) -> bool:
        """Return whether most of the smaller model has no counterpart."""
        smaller = min(len(self.mine.tensors), len(self.theirs.tensors))
        return not self.common or 2 * len(self.common) < smaller

    @property
    def differs_in_names(self) -> bool:
        """Return whether each has names that the other has not."""
        return len(self.common) < min(len(self.mine.tensors), len(self.theirs.tensors))

    def tied_to(self, name: str) -> set[str]:
        """Return the names that are the same tensor as this one."""
        return {each for names in self.ties if name in names for each in names} - {name}


def line_up(mine: OpenedCheckpoint, theirs: OpenedCheckpoint, rewriting: RewriteOptions) -> LineUp:
    """Return the models of two checkpoints under common names. No tensor byte is read.

    ``mine`` as ``rewriting`` asks, if it does. Else under their own names, or under those that a
    prefix, a wrapper's name or a key map gives the one or the other: what makes most of them alike.
    Raises Unsupported if one has no model, and as ``rewrite`` does.
    """
    bare = only_model(theirs.catalog)
    if is_plain(mine.catalog) != is_plain(theirs.catalog) and not rewriting.dequantize:
        mine, theirs = _in_full(mine), _in_full(theirs)
        bare = only_model(theirs.catalog)
    if rewriting != RewriteOptions():
        made = rewrite(mine, rewriting, check=require_sound).catalog
        return _with_ties(LineUp(_model(made), bare, "", []), mine, theirs)
    own = only_model(mine.catalog)
    ways = [LineUp(own, bare, "", [])]
    if own.tensors.keys() != bare.tensors.keys() and all(map(_is_of_megatron, (own, bare))):
        ways.append(_of_megatron(own, bare))
    if ways[0].is_unlike or ways[0].differs_in_names:
        assets, some = config_folder(theirs) or config_folder(mine), not ways[0].is_unlike
        for made, how in _renamed(theirs, bare, own, assets, some=some):
            ways.append(LineUp(own, made, f"{theirs.path} with {how}", []))
        for made, how in _renamed(mine, own, bare, assets, some=some):
            ways.append(LineUp(made, bare, f"{mine.path} with {how}", []))
    return _with_ties(max(ways, key=lambda way: way.likeness), mine, theirs)


def _renamed(
    opened: OpenedCheckpoint, bare: Catalog, wanted: Catalog, assets: Path | None, *, some: bool
) -> Iterator[tuple[Catalog, str]]:
    """Yield a model under the names of another, and the options that make it, if any do.

    If ``some`` are alike, a key map alone may: experts are packed, where all else has its names.
    """
    found = Candidate(list(bare.tensors), _MODEL)
    if some:
        candidates = mapped(opened, wanted, assets, whole=False)
        best = max(candidates, key=lambda each: each.score(wanted.tensors), default=None)
    else:
        best = find_rewriting(opened, found, bare, wanted, assets, whole=False)
    if best is not None and best is not found:
        try:
            yield _model(rewrite(opened, best.rewriting, check=require_sound).catalog), best.option
        except CkptoolError:
            return


def _in_full(opened: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return a checkpoint with the numbers of its quantized tensors instead of what is stored."""
    try:
        return replace(opened, catalog=dequantized(opened, None, None).catalog)
    except CkptoolError:
        return opened  # it is not quantized, or in an unknown way


def _is_of_megatron(catalog: Catalog) -> bool:
    return any(_IN_MEGATRON in name for name in catalog.tensors)


_IN_MEGATRON = ".mlp.linear_fc"
_GATE, _UP = "_w", "_v"
"""Ends of the halves of a gated ``linear_fc1``, which some checkpoints of Megatron-core have apart
(``singleton_local_shards``, ``fsdp_dtensor``)."""


def _of_megatron(mine: Catalog, theirs: Catalog) -> LineUp:
    """Return two models of Megatron-core with a tensor for each layer, expert and ``linear_fc1``.

    Norms have the names of Transformer Engine or of Megatron-core's own layers: those of mine.
    """
    ours, others = _unstacked(mine), dict[str, TensorEntry]()
    split = _unstacked(theirs)
    for name, entry in split.items():
        also = (name.replace(*pair) for norm in NORMS.items() for pair in (norm, norm[::-1]))
        alone = (each for each in also if each in ours and each not in split)
        called = name if name in ours else next(alone, name)
        others[called] = rename_entry(entry, called)
    return LineUp(mine.with_tensors(ours), theirs.with_tensors(others), "layer by layer", [])


def _unstacked(catalog: Catalog) -> dict[str, TensorEntry]:
    with suppress(UsageError):  # nothing is stacked
        catalog = split_stacked(catalog)
    tensors = dict(catalog.tensors)
    for name, gate in catalog.tensors.items():
        whole = name.removesuffix(_GATE)
        up = catalog.tensors.get(whole + _UP)
        if whole != name and up is not None and whole not in tensors:
            tensors[whole] = rename_entry(join([gate, up], 0), whole)
            del tensors[name], tensors[up.name]
    return tensors


def _model(catalog: Catalog) -> Catalog:
    entries = catalog.tensors.items()
    return catalog.with_tensors({n: e for n, e in entries if state_category(e) == "model"})


def config_folder(opened: OpenedCheckpoint) -> Path | None:
    """Return the folder of a checkpoint, or of a config.json, if that is there."""
    path = on_disk(opened.path)
    folder = None if path is None else path if path.is_dir() else path.parent
    return folder if folder is not None and (folder / CONFIG).is_file() else None


_HEADS = ("lm_head.weight", "output.weight", "output_layer.weight")
_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "word_embeddings.weight")


def _with_ties(lined: LineUp, *sides: OpenedCheckpoint) -> LineUp:
    """Add the names that share bytes in one of them, or that a config ties: head and embedding."""
    ties = [names for each in (lined.mine, lined.theirs) for names in tied_names(each)]
    if any(map(_ties_head, sides)):
        every = dict.fromkeys([*lined.mine.tensors, *lined.theirs.tensors])
        ties.append(tuple(name for name in every if name.endswith((*_HEADS, *_EMBEDDINGS))))
    return lined._replace(ties=ties)


def _ties_head(opened: OpenedCheckpoint) -> bool:
    """Return whether a checkpoint records that the model's head is its embedding."""
    try:
        known = records(opened.source, opened.catalog, None)
    except CkptoolError:
        return False
    return any(is_tied(record) for record in known)
