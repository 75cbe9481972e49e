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

    one: Catalog
    other: Catalog
    how: str
    ties: list[tuple[str, ...]]

    @property
    def common(self) -> list[str]:
        """Return the names that both have."""
        return [name for name in self.one.tensors if name in self.other.tensors]

    @property
    def likeness(self) -> float:
        """Return the share of all names that is common, from 0 to 1."""
        count = len(self.one.tensors) + len(self.other.tensors)
        return 2 * len(self.common) / max(1, count)

    @property
    def is_unlike(self) -> bool:
        """Return whether most of the smaller model has no counterpart."""
        smaller = min(len(self.one.tensors), len(self.other.tensors))
        return not self.common or 2 * len(self.common) < smaller

    @property
    def differs_in_names(self) -> bool:
        """Return whether each has names that the other has not."""
        return len(self.common) < min(len(self.one.tensors), len(self.other.tensors))

    def tied_to(self, name: str) -> set[str]:
        """Return the names that are the same tensor as this one."""
        return {tied_name for names in self.ties if name in names for tied_name in names} - {name}


def line_up(one: OpenedCheckpoint, other: OpenedCheckpoint, rewriting: RewriteOptions) -> LineUp:
    """Return the models of two checkpoints under common names. No tensor byte is read.

    The first is renamed as ``rewriting`` asks. If it asks nothing, names are as stored, or as a
    prefix, a wrapper's name or a key map renames one side: what makes most of them common. Raises
    Unsupported if one has no model, and as ``rewrite`` does.
    """
    target = only_model(other.catalog)
    if is_plain(one.catalog) != is_plain(other.catalog) and not rewriting.dequantize:
        one, other = _in_full(one), _in_full(other)
        target = only_model(other.catalog)
    if rewriting != RewriteOptions():
        rewritten = rewrite(one, rewriting, check=require_sound).catalog
        return _with_ties(LineUp(_model(rewritten), target, "", []), one, other)
    model = only_model(one.catalog)
    ways = [LineUp(model, target, "", [])]
    if model.tensors.keys() != target.tensors.keys() and all(map(_is_of_megatron, (model, target))):
        ways.append(_line_up_layers(model, target))
    if ways[0].is_unlike or ways[0].differs_in_names:
        assets, is_like = config_folder(other) or config_folder(one), not ways[0].is_unlike
        for rewritten, how in _rename(other, target, model, assets, is_like=is_like):
            ways.append(LineUp(model, rewritten, f"{other.path} with {how}", []))
        for rewritten, how in _rename(one, model, target, assets, is_like=is_like):
            ways.append(LineUp(rewritten, target, f"{one.path} with {how}", []))
    return _with_ties(max(ways, key=lambda way: way.likeness), one, other)


def _rename(
    opened: OpenedCheckpoint, model: Catalog, target: Catalog, assets: Path | None, *, is_like: bool
) -> Iterator[tuple[Catalog, str]]:
    """Yield a model with names of the ``target``, and the options that rename it, if any do.

    If it ``is_like`` the target already, only a key map may: it unpacks experts.
    """
    start = Candidate(list(model.tensors), _MODEL)
    if is_like:
        candidates = mapped(opened, target, assets, whole=False)
        best = max(candidates, key=lambda candidate: candidate.score(target.tensors), default=None)
    else:
        best = find_rewriting(opened, start, model, target, assets, whole=False)
    if best is not None and best is not start:
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


def _line_up_layers(one: Catalog, other: Catalog) -> LineUp:
    """Return two models of Megatron-core with a tensor for each layer, expert and ``linear_fc1``.

    Norms have the names of Transformer Engine or of Megatron-core's own layers: as in the first.
    """
    tensors, renamed = _unstack(one), dict[str, TensorEntry]()
    split = _unstack(other)
    for name, entry in split.items():
        spellings = (name.replace(*pair) for norm in NORMS.items() for pair in (norm, norm[::-1]))
        targets = (s for s in spellings if s in tensors and s not in split)
        target = name if name in tensors else next(targets, name)
        renamed[target] = rename_entry(entry, target)
    return LineUp(one.with_tensors(tensors), other.with_tensors(renamed), "layer by layer", [])


def _unstack(catalog: Catalog) -> dict[str, TensorEntry]:
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
    """Return the folder of a checkpoint, or of a file, if it has a config.json."""
    path = on_disk(opened.path)
    folder = None if path is None else path if path.is_dir() else path.parent
    return folder if folder is not None and (folder / CONFIG).is_file() else None


_HEADS = ("lm_head.weight", "output.weight", "output_layer.weight")
_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "word_embeddings.weight")


def _with_ties(lined: LineUp, *sides: OpenedCheckpoint) -> LineUp:
    """Add the names that share bytes in a model, or that a config ties: head and embedding."""
    ties = [names for catalog in (lined.one, lined.other) for names in tied_names(catalog)]
    if any(map(_ties_head, sides)):
        every = dict.fromkeys([*lined.one.tensors, *lined.other.tensors])
        ties.append(tuple(name for name in every if name.endswith((*_HEADS, *_EMBEDDINGS))))
    return lined._replace(ties=ties)


def _ties_head(opened: OpenedCheckpoint) -> bool:
    """Return whether a checkpoint records that the model's head is its embedding."""
    try:
        configs = records(opened.source, opened.catalog, None)
    except CkptoolError:
        return False
    return any(is_tied(record) for record in configs)
