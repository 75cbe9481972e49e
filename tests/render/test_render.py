"""What the screen shows, seen as text."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ckptool.commands.inspect.fold import fold, products
from ckptool.commands.inspect.report import report
from ckptool.commands.inspect.stats import TensorStats
from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.options.inspect import InspectOptions
from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    Container,
    Copy,
    EncodedBlob,
    Extent,
    ObjectEntry,
    TensorEntry,
)
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import FileLayout
from ckptool.core.mesh import Shard, StridedShard
from ckptool.core.text import magnitude, ranges, size, visible
from ckptool.errors import UsageError
from ckptool.formats import FORMATS
from ckptool.render.inspect.report import show
from ckptool.render.inspect.values import preview
from ckptool.render.messages import say, show_lines
from ckptool.render.plan import _file_rows, _group_similar
from ckptool.render.text import bar, escaped, without_inside
from ckptool.serialization.pickle.records import Call, Global
from ckptool.storage.local import LocalSource


def tensor(name, shape=(4, 2), grid=None, dtype="float32", placements=None):
    """A tensor cut evenly by ``grid``, a rank and file for each box."""
    grid = grid or (1,) * len(shape)
    chunks = []
    for rank, at in enumerate(itertools.product(*map(range, grid))):
        low = tuple(i * n // g for i, n, g in zip(at, shape, grid, strict=True))
        high = tuple((i + 1) * n // g for i, n, g in zip(at, shape, grid, strict=True))
        box = Box(low, high)
        strides = row_major_strides(box.shape, BY_NAME[dtype].itemsize)
        chunks.append(Chunk(box, Extent(f"r{rank}", 100 * rank, strides), rank))
    path = tuple(name.split("."))
    return TensorEntry(name, path, BY_NAME[dtype], shape, tuple(chunks), placements)


def screen(
    *entries, width=200, tty=False, objects=None, catalog=None, held=None, stats=(), **views
):
    """Everything ``show`` prints."""
    values = {k: ObjectEntry(k, tuple(k.split(".")), v) for k, v in (objects or {}).items()}
    found = Catalog("dcp", {e.name: e for e in entries}, values, {"f": 1}, **(catalog or {}))
    root = Path("ckpt")
    opened = OpenedCheckpoint(root, LocalSource(root, {}), FORMATS["dcp"], found)
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=tty, color_system=None, emoji=False)
    show(report(opened), console, InspectOptions(**views), stats=stats)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["w"], ["w"]),
        (["l.0.w", "l.1.w"], ["l.{0,1}.w"]),
        ([f"l.{i}.w" for i in range(32)], ["l.{0..31}.w"]),
        ([f"l.{i}.w" for i in (0, 2, 5, 6, 7)], ["l.{0,2,5..7}.w"]),
        ([f"l.{i}.e.{j}" for i in range(3) for j in range(8)], ["l.{0..2}.e.{0..7}"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.0.e.{0,1}", "l.1.e.0"]),
        (["l.0.w", "l.1.v"], ["l.0.w", "l.1.v"]),
        (["l.00.w", "l.01.w"], ["l.00.w", "l.01.w"]),
        (["l10.w", "l11.w"], ["l10.w", "l11.w"]),
        (["rng@rank0", "rng@rank1", "rng@rank2"], ["rng@rank{0..2}"]),
        (["l.10.w", "l.9.w", "a"], ["a", "l.{9,10}.w"]),
        (["optim.state.0.exp_avg", "optim.state.1.exp_avg"], ["optim.state.{0,1}.exp_avg"]),
        (["optim.state.w.exp_avg", "optim.state.w.sq"], ["optim.state.w.{exp_avg,sq}"]),
        (["exp_avg.w", "exp_avg_sq.w", "fp32.w"], ["{exp_avg,exp_avg_sq,fp32}.w"]),
        (["exp_avg.l.bias", "exp_avg.l.weight"], ["exp_avg.l.bias", "exp_avg.l.weight"]),
    ],
)
def test_fold(names, folded):
    assert [line.name for line in fold([tensor(name) for name in names])] == folded


@pytest.mark.parametrize(
    "other",
    [
        tensor("l.1.w", (4, 3)),
        tensor("l.1.w", dtype="int32"),
        tensor("l.1.w", placements=(Shard(0),)),
        tensor("l.1.w", grid=(2, 1)),
    ],
    ids=["shape", "dtype", "placements", "chunks"],
)
def test_layers_that_differ_are_not_folded(other):
    assert [line.name for line in fold([tensor("l.0.w"), other])] == ["l.0.w", "l.1.w"]


def test_tensors_fold_by_what_is_said_of_them():
    placed = {"l.0.w": "rows", "l.1.w": "rows", "l.2.w": "columns"}
    entries = [tensor(name, (size, 2)) for size, name in enumerate(placed, 3)]
    lines = fold(entries, lambda entry: placed[entry.name])
    assert [(line.name, line.count) for line in lines] == [("l.{0,1}.w", 2), ("l.2.w", 1)]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["__0_0.d", "__1_0.d", "__2_0.d", ".metadata"], ["__{0..2}_0.d", ".metadata"]),
        (
            ["m-00001-of-00003", "m-00002-of-00003", "m-00003-of-00003"],
            ["m-{00001..00003}-of-00003"],
        ),
        (["f_0", "f_2", "f_3"], ["f_0", "f_2", "f_3"]),
        (["__0_0.d", "__1_1.d", "__2_2.d"], ["__0_0.d", "__1_1.d", "__2_2.d"]),
        (["a1b1", "a2b2", "a3b1"], ["a1b1", "a2b2", "a3b1"]),
        (["f_0", "f_1"], ["f_0", "f_1"]),
        (["config.json"], ["config.json"]),
    ],
)
def test_files_that_count_from_the_first_to_the_last_are_one_line(names, shown):
    files = [FileLayout(name, ()) for name in names]
    rows = [row for group in _group_similar(files) for row in _file_rows(group)]
    assert [name for _, name, _ in rows] == shown


def test_an_optimizers_scalars_fold_into_a_glob_where_it_is_exact():
    steps = [tensor(f"optim.state.{name}.step", ()) for name in ("a", "b.c", "d")]
    assert [(line.name, line.count) for line in fold(steps)] == [("optim.state.*.step", 3)]
    odd = [*steps, tensor("optim.state.e.step", (1,))]
    assert all("*" not in line.name for line in fold(odd))


def test_products_name_every_tuple_once():
    found = {(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (3, 1), (3, 2)}
    named = [t for axes in products(found) for t in itertools.product(*axes)]
    assert sorted(named) == sorted(found)


def test_what_the_files_record_of_their_making_has_rows_of_its_own():
    info = {"writer": "torch", "metadata version": "1", "framework": "Megatron-core"}
    info |= {"version": "0.20", "parallelism": "TP 2, PP 1", "arguments": "layers 4"}
    lines = [line.split() for line in screen(tensor("w"), catalog={"info": info}).splitlines()]
    assert ["writer", "torch,", "metadata", "version", "1"] in lines
    assert ["framework", "Megatron-core", "0.20"] in lines
    assert ["parallel", "TP", "2,", "PP", "1"] in lines
    assert ["arguments", "layers", "4"] in lines
    info = {"writer": "ByteCheckpoint", "version": "0.0.2"}
    assert "ByteCheckpoint 0.0.2" in screen(tensor("w"), catalog={"info": info})


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_narrow_terminal_cuts_names_and_a_pipe_never_does(width):
    name = "optimizer.state.layers.0.attention.query_key_value.weight_with_a_long_name"
    entry = tensor(name, placements=(StridedShard(0, 2), Shard(0)))
    watched = screen(entry, width=width, tty=True).splitlines()
    table = [line for line in watched if "fp32" in line and "[4, 2]" in line]
    assert all(len(line) <= max(width, 48) for line in table)
    assert name in screen(entry, width=width)


HOSTILE = "a\n\x1b[31m[red]\u202e\ud800\x07"


@pytest.mark.parametrize("view", [{}, {"tensors": ["*"]}, {"shards": HOSTILE}, {"values": True}])
def test_hostile_names_are_spelled_out(view):
    shown = screen(tensor(HOSTILE), objects={HOSTILE + "v": HOSTILE}, **view)
    assert r"a\n\x1b[31m[red]\u202e\ud800\x07" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)


def test_tensors_lists_matches_in_full():
    shown = screen(
        tensor("l.10.w", grid=(2, 1), placements=(Shard(0),)),
        tensor("l.9.w"),
        tensor("b"),
        tensors=["l.*"],
    )
    head, nine, ten = (line.split() for line in shown.splitlines())
    assert head == ["name", "shape", "dtype", "placements", "chunks", "writers", "bytes"]
    assert nine == ["l.9.w", "[4,", "2]", "fp32", "-", "1", "0", "32"]
    assert ten == ["l.10.w", "[4,", "2]", "fp32", "Shard(0)", "2", "0,1", "32"]


def test_statistics_come_with_the_other_views():
    one = tensor("w")
    shown = screen(one, stats=[TensorStats(one)], values=True)
    assert shown.splitlines()[0].split()[:4] == ["name", "shape", "dtype", "min"]
    assert shown.splitlines()[-1] == "  no non-tensor values"


@pytest.mark.parametrize("view", [{"shards": "l.wq"}, {"tensors": ["l.wq"]}])
def test_an_unknown_name_brings_the_closest(view):
    with pytest.raises(UsageError) as caught:
        screen(tensor("l.0.wq.weight"), tensor("norm"), **view)
    assert caught.value.hint == "did you mean l.0.wq.weight?"


def test_map_of_a_value_says_that_it_is_not_a_tensor():
    with pytest.raises(UsageError, match="not a tensor"):
        screen(tensor("w"), objects={"step": 1}, shards="step")


def blocks(entry, **options):
    """The rows of the picture that begin a box, without the ruler."""
    lines = screen(entry, shards=entry.name, **options).splitlines()
    return [line.split()[-1] for line in lines if "┌" in line]


def test_map_draws_a_grid():
    top, bottom = blocks(tensor("w", (8, 8), (2, 2)))
    assert top.index("┌1") == len(top) // 2
    assert bottom.startswith("┌2")
    assert "┌3" in bottom


def test_map_is_proportional():
    boxes = [Box((0,), (6,)), Box((6,), (8,))]
    chunks = tuple(Chunk(box, Container("f", 0, 9), rank) for rank, box in enumerate(boxes))
    entry = TensorEntry("w", ("w",), BY_NAME["int8"], (8,), chunks)
    (row,) = blocks(entry)
    assert row.index("┌1") == 48


@pytest.mark.parametrize(
    ("shape", "grid", "rows"),
    [((), (), 1), ((6,), (3,), 1), ((4, 2, 6), (2, 1, 3), 2), ((4, 2, 6), (2, 1, 1), 2)],
)
def test_map_of_any_rank(shape, grid, rows):
    assert len(blocks(tensor("w", shape, grid))) == rows


def test_map_of_an_empty_tensor_has_only_a_legend():
    shown = screen(tensor("w", (0, 4)), shards="w")
    assert "empty tensor" in shown
    assert "(empty)" in shown


def test_map_marks_gaps_and_overlaps():
    entry = tensor("w", (8, 2), (4, 1))
    first, second, third, _ = entry.chunks
    moved = Chunk(Box((1, 0), (4, 2)), second.at, 1)
    broken = TensorEntry("w", ("w",), entry.dtype, (8, 2), (first, moved, third))
    shown = screen(broken, shards="w")
    assert "XXXX" in shown
    assert "····" in shown


def test_map_labels_a_replicated_box_with_all_its_ranks():
    entry = tensor("w")
    chunk = entry.chunks[0]
    copies = tuple(Copy(chunk.at, rank) for rank in (1, 2, 3))
    held = Chunk(chunk.box, chunk.at, 0, copies)
    (row,) = blocks(TensorEntry("w", ("w",), entry.dtype, entry.shape, (held,)))
    assert row.startswith("┌0..3─")


def test_map_folds_hundreds_of_boxes():
    shown = screen(tensor("w", (4096, 4), (512, 1)), shards="w").splitlines()
    assert any("512 boxes along dim 0, drawn as 32 blocks" in line for line in shown)
    assert sum("┌" in line for line in shown) == 32


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (Extent("f", 1234, (8, 4)), "1,234"),
        (Extent("f", 0, (4, 16)), "strided"),
        (Extent("f", 0, (8, 4), ops=("conj",)), "conj"),
        (EncodedBlob("f", 50, 20, "zstd", 32, 0, (8, 4)), "zstd, 32 bytes decoded"),
        (Container("f", 7, 999, ("zstd",)), "999"),
    ],
)
def test_legend_says_how_the_bytes_lie(place, told):
    chunk = Chunk(Box.whole((4, 2)), place, None)
    entry = TensorEntry("w", ("w",), BY_NAME["float32"], (4, 2), (chunk,))
    assert told in screen(entry, shards="w")


def test_ranks_fold_equal_loads_and_give_the_imbalance():
    shown = screen(
        tensor("w", (8, 2), (8, 1)), tensor("v"), rank_bytes=True, catalog={"world_size": 10}
    )
    assert "0 " in shown
    assert "1..7" in shown
    assert "8,9" in shown
    assert "10 ranks: mean 10 B, max 40 B, imbalance (max / mean) 4.17" in shown


def test_values_lists_every_value():
    shown = screen(objects={"b.10": 1, "b.9": b"xyz", "a": "t"}, values=True).splitlines()
    assert [line.split() for line in shown[1:]] == [
        ["a", "str", "'t'"],
        ["b.9", "bytes", "3", "bytes"],
        ["b.10", "int", "1"],
    ]


def _deep():
    value: list[Any] = []
    for _ in range(10_000):
        value = [value]
    return value


def _shared():
    value: list[Any] = ["x"]
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "made",
    [_deep, _shared, lambda: "x" * 10**6, lambda: list(range(10**6)), lambda: 10**9999],
    ids=["deep", "shared", "text", "list", "int"],
)
def test_preview_is_short_whatever_the_value(made):
    assert len(preview(made())) < 200


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ((1, "a"), "(1, 'a')"),
        ({"k": [None]}, "{'k': [None]}"),
        (set(), "set()"),
        (Call(Global("argparse", "Namespace"), ()), "<argparse.Namespace>"),
        (Global("torch", "bfloat16"), "torch.bfloat16"),
    ],
)
def test_preview(value, shown):
    assert preview(value) == shown


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1023 * 1024 + 1000, "1.00 MiB"),
        (int(1.5 * 2**30), "1.50 GiB"),
        (2**60, "1,024 PiB"),
    ],
)
def test_size(nbytes, shown):
    assert size(nbytes) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(9999, "9,999"), (12_345, "12.3 K"), (6_738_415_616, "6.74 B")]
)
def test_magnitude(count, shown):
    assert magnitude(count) == shown


def test_small_words():
    assert ranges([0, 1, 2, 3, 7, 9, 10]) == "0..3,7,9,10"
    assert visible("a\tb\u200fc") == "a\\tb\\u200fc"
    assert Text.from_markup(escaped("[red]x[/]")).plain == "[red]x[/]"
    assert bar(0.5, 4) == "██"
    assert bar(0.0, 4) == ""
    assert bar(0.001, 4) == "▏"
    assert without_inside(Text("abcdefghij"), 5, 0.5).plain == "ab…ij"


@pytest.mark.parametrize("width", [24, 40, 60])
def test_a_sentence_is_wrapped_between_words(width: int) -> None:
    command = "`ckptool verify runs/step-1000 --quick`"
    sentence = f"use another copy of the file, or the previous checkpoint: {command}, by [name]"
    file = io.StringIO()
    screen = Console(file=file, width=width, force_terminal=True, highlight=False)
    show_lines([[], ["  ", ("hint:", "cyan"), f" {sentence}"]], screen=screen)
    shown = Text.from_ansi(file.getvalue()).plain
    blank, first, *more = shown.splitlines()
    assert blank == ""
    assert first.startswith("  hint: use")
    assert all(line.startswith("    ") for line in more)
    assert shown.split() == f"hint: {sentence}".split()
    assert command in shown
    longest = max(cell_len(line) for line in shown.splitlines() if command not in line)
    assert longest <= width


def test_nobody_watches_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    say("words " * 100)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("color", [None, "1"])
def test_a_line_is_the_same_with_colors_and_without(
    color: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untrusted text is no markup, and spelled out."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if color is not None:
        monkeypatch.setenv("FORCE_COLOR", color)
    say(("[red]a\x1b", "bold"), ": b\u202e [/] \\", stderr=True)
    shown = capsys.readouterr().err
    assert ("\x1b[1m" in shown) is (color is not None)
    assert Text.from_ansi(shown.strip()).plain == "[red]a\\x1b: b\\u202e [/] \\"


@pytest.mark.parametrize("head", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("width", range(12, 44))
def test_numbers_in_braces_are_not_cut_inside(width: int, head: float) -> None:
    name = "optim.state.layers.{0..11}.q_proj.weight.{…}"
    shown = without_inside(Text(name), width, head).plain
    assert len(shown) == width
    first, _, last = shown.replace("{…}", "{}").partition("…")
    assert [end.count("{") - end.count("}") for end in (first, last)] == [0, 0]
