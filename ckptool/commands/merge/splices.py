"""Take tensors from other checkpoints: each with all that its numbers need, or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from shlex import quote

from msgspec.structs import replace

from ckptool.commands.merge.expressions import Computation, Expression
from ckptool.commands.merge.operands import Operand
from ckptool.commands.merge.ties import notes_on_head
from ckptool.commands.model.assets import quantization_config
from ckptool.core.casts import scales_of_codes
from ckptool.core.catalog import Catalog, TensorEntry, tied_names
from ckptool.core.quantization.config import QuantizationConfig
from ckptool.core.quantization.names import kinds, quantized_groups, quantized_names
from ckptool.core.quantization.scale_names import Scales
from ckptool.core.selection import meant_by, tensors_named
from ckptool.core.text import list_some
from ckptool.errors import Unsupported, UsageError

_FEW = 3
_DEQUANTIZE = "--dequantize takes the numbers that quantized tensors stand for"


class Splice:
    """A merge of which tensors are replaced by those of others; ``base`` is its first operand."""

    def __init__(self, computation: Computation, base: Operand) -> None:
        self._computation, self._base = computation, base
        self._tensors: dict[str, TensorEntry] = dict(computation.catalog.tensors)
        self._expressions = {e.name: e for e in computation.expressions}
        self._origins = dict.fromkeys(self._tensors, base)
        self._takes: list[tuple[str, Operand, list[str]]] = []

    def take(self, name: str, operand: Operand) -> None:
        """Take the tensors that a name means, in place of those that the merge has.

        Raises UsageError if it means none.
        """
        taken_names = _tensors_of(name, operand)
        for old in [*filter(meant_by([name], self._tensors), self._tensors)]:
            del self._tensors[old], self._expressions[old], self._origins[old]
        for new in taken_names:
            self._tensors[new] = operand.catalog.tensors[new]
            self._expressions[new] = Expression(new, operand.label)
            self._origins[new] = operand
        self._takes.append((name, operand, taken_names))

    def result(self, assets: Path | None) -> Computation:
        """Return the merge with what was taken; Unsupported if a quantized tensor is torn apart.

        Raises UsageError if nothing is left of what one name took.
        """
        self._require_left()
        donors = [operand for operand in self._sources() if operand is not self._base]
        for operand in (*donors, self._base):
            self._require_whole(operand)
        for operand in donors:
            self._require_declared(operand, assets)
        catalog = self._computation.catalog
        names = dict.fromkeys([*catalog.tensors, *self._tensors])
        tensors = {name: self._tensors[name] for name in names if name in self._tensors}
        expressions, result = tuple(self._expressions.values()), catalog.with_tensors(tensors)
        taken_names = [name for name, origin in self._origins.items() if origin is not self._base]
        on_head = notes_on_head(self._base, assets, taken_names)
        notes = (*self._computation.notes, *self._notes_on_ties(result), *on_head)
        return replace(self._computation, catalog=result, expressions=expressions, notes=notes)

    def _require_left(self) -> None:
        """Raise UsageError for a name of which all tensors were taken from elsewhere later."""
        for text, operand, names in self._takes:
            if not any(self._origins.get(name) is operand for name in names):
                raise UsageError(
                    f"--take '{text}' FROM {operand.opened.path}: a later --take takes all of it"
                    " from another checkpoint",
                    hint="leave it out, or say it last",
                )

    def _notes_on_ties(self, result: Catalog) -> Iterator[str]:
        """Yield notes on names of one tensor that are several in the result."""
        ties = [set(names) for names in tied_names(result)]
        for names in tied_names(self._computation.catalog):
            if not any(tie.issuperset(names) for tie in ties):
                yield (
                    f"{list_some(names, _FEW)}: one tensor in {self._base.opened.path}, several in"
                    " the result: a model that ties them uses only one"
                )

    def _sources(self) -> list[Operand]:
        return [*{operand.label: operand for operand in self._origins.values()}.values()]

    def _names_of(self, operand: Operand) -> set[str]:
        """Return the names that the result has from a checkpoint."""
        return {name for name, origin in self._origins.items() if origin is operand}

    def _require_whole(self, operand: Operand) -> None:
        """Raise Unsupported if the result has some of a checkpoint's quantized tensor, not all."""
        names = self._names_of(operand)
        for group in _groups(operand):
            parts, missing = sorted(group & names), sorted(group - names)
            if parts and missing:
                module = parts[0].rpartition(".")[0]
                raise Unsupported(
                    f"--take: {list_some(parts, _FEW)} without {list_some(missing, _FEW)} of"
                    f" {operand.opened.path}: a quantized tensor comes with all of its parts",
                    hint=f"--take '{module}' FROM SRC takes all of a module; {_DEQUANTIZE}",
                )

    def _require_declared(self, operand: Operand, assets: Path | None) -> None:
        """Raise Unsupported if the config would say another quantization than tensors have."""
        theirs, ours = quantized_names(operand.catalog), quantized_names(self._base.catalog)
        names = self._names_of(operand)
        if quantized := sorted(names & theirs):
            self._require_same(operand, quantized, assets)
            return
        config = quantization_config(self._base.opened, assets) if ours else {}
        plain = sorted(self._find_plain(names - theirs, _modules(ours), QuantizationConfig(config)))
        if plain and config:
            raise Unsupported(
                f"--take: {list_some(plain, _FEW)} of {operand.opened.path} is not quantized, and"
                f" the config of {self._base.opened.path} says that it is",
                hint=f"{_DEQUANTIZE}; --hf-assets FOLDER takes a config.json that leaves it out, as"
                " in modules_to_not_convert",
            )

    def _find_plain(
        self, names: Iterable[str], quantized: Collection[str], config: QuantizationConfig
    ) -> Iterator[str]:
        """Yield the matrices that are to be quantized: in the base, or like layers that are."""
        layers = {_layer(module) for module in quantized}
        for name in names:
            module = name.rpartition(".")[0]
            is_like = module in quantized or (config.is_of_all and _layer(module) in layers)
            if is_like and len(self._tensors[name].shape) > 1 and not config.leaves_out(module):
                yield name

    def _require_same(self, operand: Operand, names: list[str], assets: Path | None) -> None:
        """Raise Unsupported if the base's config does not say how quantized tensors are stored."""
        sides = (self._base, operand)
        ours, theirs = (quantization_config(side.opened, assets) for side in sides)
        base_kinds, new_kinds = (kinds(side.catalog).keys() for side in sides)
        if ours == theirs and (ours or new_kinds <= base_kinds):
            return
        why = "says another quantization" if ours else "says no quantization"
        raise Unsupported(
            f"--take: {list_some(names, _FEW)} of {operand.opened.path} is quantized, and the"
            f" config of {self._base.opened.path} {why}",
            hint=f"{_DEQUANTIZE}; --hf-assets FOLDER takes a config.json that says how",
        )


def _tensors_of(name: str, operand: Operand) -> list[str]:
    """Return the tensors that a name means; UsageError, with the checkpoint, if it means none."""
    try:
        return tensors_named(operand.catalog, [name], "--take")
    except UsageError as error:
        place = operand.opened.path
        hint = (error.hint or "").replace("CKPT", quote(str(place)))
        raise UsageError(f"{error} of {place}", hint=hint) from None


def _groups(operand: Operand) -> Iterator[set[str]]:
    """Yield the names of each quantized tensor, and of what may be one of an unknown kind."""
    groups, scales = quantized_groups(operand.catalog), Scales(operand.catalog.tensors)
    yield from groups
    for entry, scale in scales_of_codes(operand.catalog, scales, set[str]().union(*groups)):
        yield {entry.name, scale}


def _modules(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def _layer(module: str) -> str:
    """Return what a layer is called in its block, such as q_proj."""
    return module.rpartition(".")[2]
