"""Rewrite several checkpoints alike: an option must apply to one of them, not to each."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ckptool.commands.convert import require_some
from ckptool.commands.open import OpenedCheckpoint, Opens
from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.rewrite import NoModel, RewriteResult, rewrite
from ckptool.core.quantization.apply import NoneQuantized
from ckptool.core.selection import Unmatched
from ckptool.errors import Unsupported

_LISTS = {"--select": "select", "--drop": "drop", "--rename": "rename"}


class Rewriter:
    """Rewrites checkpoints in the same way, each as far as it applies to it.

    Patterns that mean nothing in a checkpoint are left out for it, but for the last of --select,
    without which all would be kept; what has no quantized tensors is not dequantized.
    """

    def __init__(self, options: RewriteOptions) -> None:
        self._options = options
        self._unmatched: list[dict[tuple[str, str], Unmatched]] = []
        self._plain: list[str] = []

    def rewrite(self, opened: OpenedCheckpoint) -> RewriteResult:
        """Rewrite a checkpoint; the errors are those of ``rewrite``."""
        options, unmatched = self._options, dict[tuple[str, str], Unmatched]()
        self._unmatched.append(unmatched)
        while True:
            try:
                return rewrite(opened, options, opens=Opens.AT_ONCE, check=require_some)
            except NoModel:
                raise NoModel(
                    f"{opened.path}: no tensors of a model, which is what merge keeps",
                    hint=f"`ckptool inspect {opened.path}` lists what there is; --with-optimizer"
                    " keeps all",
                ) from None
            except NoneQuantized:
                self._plain.append(str(opened.path))
                options = replace(options, dequantize=False)
            except Unmatched as error:
                unmatched[error.option, error.pattern] = error
                selection = _without(options.selection, error)
                options = replace(options, selection=selection)

    def require_used(self) -> None:
        """Raise the error of an option that applied to no checkpoint."""
        for first in self._unmatched[:1]:
            for key, error in first.items():
                if all(key in other for other in self._unmatched):
                    raise error
        if self._plain and len(self._plain) == len(self._unmatched):
            raise Unsupported(
                f"--dequantize: no tensors with supported scales in {' and '.join(self._plain)}",
                hint="leave it out; `ckptool help formats` lists what is supported",
            )


def _without(selection: Selection, error: Unmatched) -> Selection:
    """Return a selection without a pattern that means nothing; raise if it is all of --select."""
    if error.option == "--strip-prefix":
        return replace(selection, strip_prefix=None)
    name = _LISTS[error.option]
    rest = tuple(pattern for pattern in getattr(selection, name) if pattern != error.pattern)
    if name == "select" and not rest:
        raise error
    change: Any = {name: rest}
    return replace(selection, **change)
