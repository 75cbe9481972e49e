"""How to show what differs between two checkpoints."""

from __future__ import annotations

from ckptool.commands.options.declaration import FLAG, OptionSet, group, option
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.run import WORKERS
from ckptool.commands.options.screen import HTML
from ckptool.commands.options.verify import CompareOptions


class DiffOptions(OptionSet):
    """How to read both, how to rewrite the first before it is compared, and whether to read data.

    Without ``values`` only names, shapes and element types of tensors are compared.
    """

    values: bool = option(
        "--values", FLAG, help="Read both: compare the content of tensors, values and files too."
    )
    read: ReadOptions = group(ReadOptions)
    compare: CompareOptions = group(CompareOptions, "When values are equal")
    rewrite: RewriteOptions = group(RewriteOptions)
    workers: int | None = WORKERS
    html: str | None = HTML
