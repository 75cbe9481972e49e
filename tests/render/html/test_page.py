"""``--html``: one self-contained file, small, and inert whatever names it contains."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.bench_samples import measured
from bench.bench_samples import report as bench_report
from conftest import case
from large_checkpoint import entry, large_report
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from ckptool.cli.app import app
from ckptool.cli.bench import _show
from ckptool.commands.inspect.report import InspectReport, report
from ckptool.commands.options.bench import BenchCommand
from ckptool.commands.options.screen import Screen
from ckptool.core.box import Box
from ckptool.core.catalog import ObjectEntry, TensorEntry
from ckptool.core.mesh import Mesh, Placement, Replicate, Shard
from ckptool.core.sharding.dtensor import local_shards
from ckptool.errors import CkptoolError
from ckptool.render.html.holdings import holdings
from ckptool.render.html.page import MARK, inspect_page

SOURCE = case("dcp_fsdp2_tp").path
OTHER = case("dcp_base").path
HOSTILE = [
    *("</script><script>alert(1)</script>", "<!--", "]]>", "--><img src=x onerror=alert(1)>"),
    *("__proto__.constructor", "a\u2028b\u2029c", "\u202egnp.exe", "\ud800", "&lt;b&gt;", ""),
    *("$data ${script}", "javascript:alert(1)", "a\x00b\nc", "'\"`\\", "x" * 5000, "a." * 3000),
]


class Page(HTMLParser):
    """The elements of a page, with their attributes, and what is in each script and style."""

    def __init__(self, data: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        assert data.startswith(MARK)
        self.feed(data.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))

    @property
    def json(self) -> dict[str, Any]:
        """What the script reads."""
        at = next(i for i, (_, attrs) in enumerate(self.tags) if attrs.get("id") == "report")
        scripts = [text for tag, text in self.texts if tag == "script" and text.strip()]
        assert [tag for tag, _ in self.tags[at:]] == ["script", "script"]
        content: dict[str, Any] = json.loads(scripts[0])
        return content

    @property
    def policy(self) -> str:
        (policy,) = (attrs["content"] for _, attrs in self.tags if "http-equiv" in attrs)
        return policy or ""


def unpacked(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [table["looks"][look] | {table["key"]: name} for name, look in table["rows"]]


def with_tensors(tensors: dict[str, TensorEntry], **more: Any) -> InspectReport:
    """A report of these tensors on 64 ranks."""
    whole = large_report(1)
    catalog = replace(whole.catalog, tensors=tensors, **more)
    return report(replace(whole.opened, catalog=catalog))


FLAT = (Shard(0),)
WHOLE = entry("w", (64 * 997, 64), "bfloat16", Mesh.of((64,)), FLAT)


def ragged(number: int) -> TensorEntry:
    """A tensor that 64 ranks cut at places of its own, as nothing else does."""
    whole = replace(WHOLE, name=f"layers.{number}.ragged.weight")
    edges = [0, *(997 * k + (number * k) % 131 for k in range(1, 64)), 64 * 997]
    chunks = tuple(
        replace(chunk, box=Box((low, 0), (high, 64)))
        for chunk, (low, high) in zip(whole.chunks, pairwise(edges), strict=True)
    )
    return replace(whole, chunks=chunks, placements=None)


def test_a_page_of_a_thousand_tensors_on_64_ranks_is_small_whatever_their_shapes() -> None:
    large = large_report()
    assert (large.totals.tensors, large.catalog.world_size) == (1008, 64)
    assert len(inspect_page(large)) < 200_000
    made = {each.name: each for each in map(ragged, range(1000))}
    assert len(inspect_page(with_tensors(made))) < 2_000_000


def test_a_page_has_no_address_and_may_request_nothing() -> None:
    data = inspect_page(large_report(1))
    assert not re.search(rb"https?:|url\(|@import|\bfetch\(|XMLHttp|innerHTML|eval\(", data)
    found = Page(data)
    assert not {"src", "href", "style"} & {name for _, attrs in found.tags for name in attrs}
    rules = dict(rule.strip().split(" ", 1) for rule in found.policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert all(re.fullmatch(r"'sha256-[\w+/]+='", rules[f"{x}-src"]) for x in ("style", "script"))


def test_hostile_names_are_data_and_nothing_else() -> None:
    usual = [tag for tag, _ in Page(inspect_page(large_report(1))).tags]
    made = entry("w", (8, 4), "float32", Mesh.of((64,)), FLAT)
    whole = with_tensors(
        {name: replace(made, name=name) for name in HOSTILE},
        objects={name: ObjectEntry(name, (name,), f"<b>{name}") for name in HOSTILE},
        notes=("<script>alert(2)</script>",),
        info={"writer": "<script>", "<b>": "x"},
    )
    opened = replace(whole.opened, path=Path("</title><script>alert(3)</script>"))
    data = inspect_page(replace(whole, opened=opened))
    found = Page(data)
    assert [tag for tag, _ in found.tags] == usual
    assert [row["name"] for row in unpacked(found.json["tensors"])] == HOSTILE
    assert [row["value"] for row in found.json["values"]] == [f"<b>{name}" for name in HOSTILE]
    body = data.split(b'id="report">')[1].split(b"</script>")[0]
    assert body.isascii()
    assert not set(b"<>&\x00") & set(body)


def boxes_of(shape: dict[str, Any]) -> Iterator[Box]:
    """The boxes that the page's scripts make of what it holds."""
    if "boxes" in shape:
        yield from (Box(tuple(lo), tuple(hi)) for lo, hi in shape["boxes"])
        return
    dims = []
    for runs in shape["edges"]:
        edges = [start + step * i for start, step, count in runs for i in range(count)]
        dims.append(list(pairwise(edges)))
    for spans in product(*dims):
        yield Box(tuple(low for low, _ in spans), tuple(high for _, high in spans))


def ranks_of(text: str) -> list[int]:
    ends = [[int(end) for end in part.split("..")] for part in text.split(",") if part]
    return [rank for end in ends for rank in range(end[0], end[-1] + 1)]


@pytest.mark.parametrize("mesh", [(4,), (2, 3), (3, 2, 2)])
@pytest.mark.parametrize("shape", [(13, 8), (7,), (4, 4, 4)])
def test_who_holds_what_is_what_dtensor_says(mesh: tuple[int, ...], shape: Sequence[int]) -> None:
    grid = Mesh.of(mesh)
    kinds: tuple[Placement, ...] = (Shard(0), Shard(len(shape) - 1), Replicate())
    for placements in product(kinds, repeat=len(mesh)):
        made = entry("w", tuple(shape), "float32", grid, placements)
        found = holdings(with_tensors({"w": made}, mesh=grid).catalog)
        held: dict[int, set[Box]] = {}
        texts = found.ranks[found.of["w"]["ranks"]]
        for box, text in zip(boxes_of(found.boxes[found.of["w"]["boxes"]]), texts, strict=True):
            for rank in ranks_of(text):
                held.setdefault(rank, set()).add(box)
        for rank, shard in enumerate(local_shards(shape, mesh, placements)):
            volume = math.prod(shard.shape)
            assert sum(box.volume for box in held.get(rank, ())) == volume
            pieces = [piece.box for piece in shard.pieces]
            assert all(any(p.contains(box) for p in pieces) for box in held.get(rank, ()))
        assert found.of["w"]["by"] == "placements"


def test_a_mesh_whose_ranks_are_not_in_order_says_where_each_is() -> None:
    mesh = Mesh((2, 2), None, (3, 1, 0, 2))
    made = replace(entry("w", (8, 4), "float32", mesh, (Shard(0), Shard(1))), chunks=())
    content = Page(inspect_page(with_tensors({"w": made}, mesh=mesh, world_size=4))).json
    assert content["held"]["order"] == [3, 1, 0, 2]
    assert content["held"]["ranks"] == [["3", "1", "0", "2"]]
    assert Page(inspect_page(large_report(1))).json["held"]["order"] is None


def test_without_placements_it_is_who_wrote_each_box() -> None:
    whole = with_tensors({"w": ragged(1)})
    found = holdings(whole.catalog)
    boxes = list(boxes_of(found.boxes[0]))
    assert boxes == [chunk.box for chunk in whole.catalog.tensors["w"].chunks]
    assert (found.of["w"]["by"], found.ranks[0]) == ("files", [str(rank) for rank in range(64)])


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def test_each_command_writes_the_page_of_its_report(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2), "a": torch.zeros(1), "c": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2), "b": torch.zeros(1), "c": torch.ones(2)}, tmp_path / "b.pt")
    for step in (1, 2):
        (tmp_path / f"run/step-{step}").mkdir(parents=True)
        torch.save({"w": torch.zeros(step)}, tmp_path / f"run/step-{step}/m.pt")
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    lines: dict[str, tuple[object, ...]] = {
        "ckptool.inspect/2": ("inspect", SOURCE, "--stats", "embed"),
        "ckptool.inspect-run/2": ("inspect", tmp_path / "run"),
        "ckptool.diff/2": ("diff", a, b, "--values"),
        "ckptool.verify/2": ("verify", a, "--against", b),
        "ckptool.verify-run/2": ("verify", tmp_path / "run", "--all"),
    }
    for schema, words in lines.items():
        file = tmp_path / "page.html"
        done = invoke(*words, "--json", "--html", file)
        shown, held = json.loads(done.stdout), Page(file.read_bytes()).json
        assert shown["schema"] == schema
        assert {key: like(held[key], value) for key, value in shown.items()} == shown


def like(held: Any, shown: Any) -> Any:
    """What a page holds, unpacked where it is packed, without what JSON on the screen lacks."""
    if not isinstance(held, dict) or "looks" not in held:
        return held
    return [{k: v for k, v in row.items() if k in shown[0]} for row in unpacked(held)]


def test_bench_writes_its_page_and_prints_its_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = bench_report(measured("dcp-sync", 2.0, 2.5), measured("<b>", 0.5, 3.0))
    file = tmp_path / "bench.html"
    _show(made, None, BenchCommand(), Screen(quiet=True), file)
    assert "dcp-sync" in capsys.readouterr().out
    assert [row["name"] for row in Page(file.read_bytes()).json["strategies"]] == [
        "<b>",
        "dcp-sync",
    ]


def test_findings_come_with_what_their_codes_mean(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"PK\x03\x04 no archive")
    file = tmp_path / "page.html"
    assert invoke("verify", tmp_path / "m.pt", "--html", file, "-q").exit_code == 1
    held = Page(file.read_bytes()).json
    assert {each["code"] for each in held["findings"]} == set(held["meanings"])
    assert all(held["meanings"].values())


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("-", 2, "needs the name of a file"),
        ("", 2, "needs the name of a file"),
        ("s3://bucket/page.html", 2, "not a URL"),
        (".", 2, "a folder, not a file"),
        ("mine.html/page.html", 4, "not a folder to write into"),
        ("mine.html", 4, "not a page that ckptool wrote"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_done(
    name: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.html").write_text("<!doctype html>\n<p>mine")
    for words in (["inspect", "gone"], ["diff", "gone", "gone"], ["verify", "gone"], ["bench"]):
        done = invoke(*words, "--html", name)
        assert isinstance(done.exception, CkptoolError)
        assert done.exception.exit_code == code
        assert says in str(done.exception)
    assert (tmp_path / "mine.html").read_text() == "<!doctype html>\n<p>mine"


def test_an_earlier_page_is_replaced_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page.html"
    assert invoke("inspect", SOURCE, "--html", file).exit_code == 0
    old = file.read_bytes()
    monkeypatch.setattr(os, "fsync", interrupt)
    assert invoke("inspect", OTHER, "--html", file).exit_code == 130
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert file.read_bytes() == old
    monkeypatch.undo()
    assert invoke("inspect", OTHER, "--html", file).exit_code == 0
    assert file.read_bytes() != old


def interrupt(descriptor: int) -> None:
    raise KeyboardInterrupt
