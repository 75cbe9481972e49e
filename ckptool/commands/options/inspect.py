"""What to show of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptool.commands.options import FILE, MESH
from ckptool.commands.options.declaration import COUNT, FLAG, TEXTS, Kind, OptionSet, group, option
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import NAMED
from ckptool.commands.options.screen import HTML, form_option

if TYPE_CHECKING:
    from ckptool.core.mesh import Mesh

TABLES = ("csv", "markdown")
FORMS = ("text", "json", *TABLES)


class InspectOptions(OptionSet):
    """What to show of a checkpoint, in which order and form, and how to read it."""

    tensors: tuple[str, ...] = option(
        "--tensors",
        TEXTS,
        metavar="NAME",
        completes_names=True,
        help=f"List matching tensors in full: {NAMED} (repeatable).",
    )
    shards: str | None = option(
        "--shards",
        metavar="NAME",
        completes_names=True,
        help="Draw a tensor, or all that match: which rank and file holds which box.",
    )
    depth: int | None = option(
        "--depth",
        COUNT,
        minimum=1,
        help="Group tensors by the first N parts of their names: count, size, element types.",
    )
    sort: str = option(
        "--sort",
        Kind(Literal["name", "size"], "str"),
        default="name",
        metavar="name|size",
        help="Sort tensors and modules.",
    )
    rank_bytes: bool = option(
        "--rank-bytes", FLAG, help="Show the bytes per rank, and the imbalance."
    )
    mesh: Mesh | None = option(
        "--mesh",
        MESH,
        help="Show what each rank of this mesh would hold after a reshard, with mean and maximum:"
        " 2x4, 8, or dp=2,tp=4.",
    )
    values: bool = option("--values", FLAG, help="Show the non-tensor values.")
    stats: tuple[str, ...] = option(
        "--stats",
        TEXTS,
        metavar="NAME",
        completes_names=True,
        help="Read matching tensors, '*' for all: min, max, mean, std, NaN, Inf (repeatable).",
    )
    export: Path | None = option("--export", FILE, help="Also save the screen as an .svg file.")
    html: str | None = HTML
    read: ReadOptions = group(ReadOptions, without=("split_stacked",))
    verbose: bool = option(
        "--verbose",
        FLAG,
        short="-v",
        help="For a URL, show how much was requested from the store.",
    )
    form: str | None = form_option(
        lambda: FORMS,
        "Print text, json (same as --json), or one table as csv or markdown: the tensors, or what"
        " --depth, --shards, --rank-bytes, --mesh, --values or --stats select; for a run, its"
        " steps.",
    )

    def views(self) -> list[str]:
        """Return the lists of the report that are asked for."""
        options = {
            "stats": self.stats, "modules": self.depth, "shards": self.shards,
            "rank_bytes": self.rank_bytes, "holdings": self.mesh, "values": self.values,
            "tensors": self.tensors,
        }  # fmt: skip
        return [view for view, option in options.items() if option]


OVERVIEW = InspectOptions()
