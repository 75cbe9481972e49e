"""Any checkpoint onto any mesh: bit-equal, cut as torch cuts, completely or not at all."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import (
    GOOD,
    TENSORS_OF,
    Bits,
    Case,
    bits,
    by_name,
    case,
    convert_to,
    read_back,
    run_command,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard import reshard as reshard_module
from ckptool.commands.reshard.load_check import check_loads, require_loadable
from ckptool.commands.reshard.reshard import Reshard, ReshardReport, prepare_reshard
from ckptool.commands.transfer import transfer as transfer_module
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data
from ckptool.core.mesh import Mesh, Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.placement import POLICIES, PlacedTensors, parse_mesh, parse_rule
from ckptool.engine.check.digest import digests
from ckptool.engine.ranks import Ranks
from ckptool.engine.read.tensors import TensorSource
from ckptool.engine.run_options import RunOptions
from ckptool.engine.write import stage as stage_module
from ckptool.errors import Damaged, TransferError, Unsupported, UsageError
from ckptool.formats import FORMATS, targets
from ckptool.formats.base import Request
from ckptool.render.reshard import show_reshard

MESHES = ("2", "3", "2x2", "2x4", "2x2x2")
OF_A_RANK = ("extra_state.", "random_states.", "rank")
WRITERS = targets(mesh=True)
OF_A_TRAINER = ("verl", "accelerate")
REOPENED = [n for n, row in WRITERS.items() if not row.loading.rules() and n not in OF_A_TRAINER]
"""Targets that take tensors of any name, cut in any way."""
LOADED = [name for name in TENSORS_OF if name in WRITERS]
"""Targets that a loader of their own framework reads here."""


def options(mesh: str, **more: Any) -> ReshardOptions:
    run = RunOptions(workers=2, fsync=False)
    transfer = TransferOptions(
        more.pop("overwrite", False), more.pop("resume", False), more.pop("verify", True), run
    )
    rules = tuple(map(parse_rule, more.pop("rules", ())))
    return ReshardOptions(mesh=parse_mesh(mesh), rules=rules, transfer=transfer, **more)


def prepared(source: Path, target: Path | None, mesh: str, **more: Any) -> Reshard:
    return prepare_reshard(source, target, options(mesh, **more))


def reshard(source: Path, target: Path, mesh: str, **more: Any) -> ReshardReport:
    return prepared(source, target, mesh, **more).run()


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Type, shape and content hash of every tensor, as ckptool reads it."""
    opened = open_checkpoint(path, ReadOptions(per_rank=True))
    located = opened.open_containers(opened.catalog).tensors
    hashes = digests(located.values(), TensorSource(opened.source), 1)
    return {n: (e.dtype.name, e.shape, hashes[n]) for n, e in located.items()}


def of_the_model(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not name.startswith(OF_A_RANK)}


def in_model(found: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("model."): value for name, value in found.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that torch wrote: uneven, empty, 0-d, several types, values."""
    path = tmp_path_factory.mktemp("source") / "ckpt"
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    state = {
        "model": {
            "w": random(10, 7),
            "wide": random(3, 40).to(torch.bfloat16),
            "cube": random(5, 4, 6),
            "bias": random(9),
            "one": random(1),
            "none": torch.empty(0, 4),
            "seen": torch.tensor(3),
            "mask": torch.arange(11) % 3 == 0,
        },
        "optim": {"state": {"w": {"exp_avg": random(10, 7), "step": torch.tensor(5.0)}}},
        "lr": 0.125,
        "betas": (0.9, 0.95),
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module")
def truth(source: Path) -> dict[str, Bits]:
    return read_back("dcp", source)


# Bit-equal


@pytest.mark.parametrize("target", LOADED)
@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_every_good_checkpoint_onto_another_mesh(one: Case, target: str, out: Path) -> None:
    """Onto one of the meshes for each target: it knows nothing of the format that is cut for it."""
    mesh = MESHES[(GOOD.index(one) + LOADED.index(target)) % len(MESHES)]
    source = one.path
    if one.unread:
        with pytest.raises(Unsupported, match=one.unread[0]):
            reshard(source, out / mesh, mesh, to=target, rank_state="drop")
        source = out / "rest"
        convert_to("dcp", one.path, source, drop=one.unread)
    reshard(source, out / mesh, mesh, to=target, rank_state="drop")
    assert of_the_model(read_back(target, out / mesh)) == of_the_model(one.truth), mesh


@pytest.mark.parametrize("target", REOPENED)
@pytest.mark.parametrize(
    "name", ["dcp_fsdp2", "dcp_fsdp2_tp", "dcp_hsdp", "dcp_replicated", "rank_base", "hf_sharded"]
)
def test_and_back(name: str, target: str, out: Path) -> None:
    """From mesh to mesh, by placements that were kept, and back again."""
    here, before = case(name).path, None
    for step, mesh in enumerate(("2x4", "3", "2x2x2", "2", "2x2", "1")):
        reshard(here, out / str(step), mesh, to=target, rank_state="drop")
        here = out / str(step)
        found = contents(here)
        assert found == (before or found)
        before = found
    whole, ended = (of_the_model(found) for found in (contents(case(name).path), before or {}))
    if target == "torch-checkpointing":
        assert in_model(ended) == in_model(whole), "its files are named after a first step"
    else:
        assert ended == {name: whole[name] for name in ended}


@pytest.mark.parametrize("target", REOPENED)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("policy", [*POLICIES, None])
def test_every_policy(
    policy: str | None, mesh: str, target: str, source: Path, out: Path
) -> None:  # fmt: skip
    report = reshard(source, out / "r", mesh, policy=policy, to=target)
    before, after = contents(source), contents(out / "r")
    carried = {n: v for n, v in before.items() if n in after}
    assert after == carried
    if target != "dcp-safetensors":
        assert after == before
    assert report.target_format == target


RULES = [
    ("2x4", ("*.w=Shard(0),Shard(1)",)),
    ("2x4", ("*.w=Shard(1),Shard(0)", "*.cube=Shard(2),Shard(-3)")),
    ("2x2", ("*.w=StridedShard(0,2),Shard(0)", "*.cube=Shard(1),Replicate()")),
    ("4x2", ("*.bias=StridedShard(0,2),Shard(0)",)),
    ("2", ("*.bias=StridedShard(0,3)", "*.cube=StridedShard(2,2)")),
    ("2x2x2", ("*.w=Shard(0),Shard(0),Shard(1)",)),
    ("2x2x2x2", ("*.w=Shard(0),Shard(1),Shard(0),Shard(1)",)),
    ("dp=2,tp=2", ("*.w=colwise", "*.cube=rowwise")),
]


@pytest.mark.parametrize("target", REOPENED)
@pytest.mark.parametrize(("mesh", "rules"), RULES, ids=str)
def test_every_kind_of_rule(
    mesh: str, rules: tuple[str, ...], target: str, source: Path, out: Path
) -> None:
    reshard(source, out / "r", mesh, rules=rules, policy="fsdp", to=target)
    after, before = contents(out / "r"), contents(source)
    assert after == {name: before[name] for name in after}
    if target in TENSORS_OF:
        assert read_back(target, out / "r") == read_back("dcp", source)


def test_values_and_nesting_come_along(source: Path, out: Path) -> None:
    reshard(source, out / "r", "2x2")
    wanted, found = (TENSORS_OF["dcp"](path) for path in (source, out / "r"))
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in wanted.items()}
    objects = open_checkpoint(out / "r").catalog.objects
    assert {name: one.value for name, one in objects.items()} == {"lr": 0.125, "betas": (0.9, 0.95)}


# What torch itself would hold


def ours(report: ReshardReport) -> dict[str, dict[int, set[Box]]]:
    """The boxes of each tensor that are in each rank's file."""
    return by_rank(report.files)


def by_rank(files: Sequence[Any]) -> dict[str, dict[int, set[Box]]]:
    found: dict[str, dict[int, set[Box]]] = defaultdict(lambda: defaultdict(set))
    for file in files:
        for part in file.parts:
            if isinstance(part, Data):
                found[part.name][file.rank].add(part.box)
    return found


def torch_boxes(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]
) -> list[Box]:
    """The box of each rank, as torch's checkpoint of a DTensor says it."""
    from torch.distributed.tensor import _utils

    theirs = [_theirs(one, len(shape)) for one in placements]
    found = []
    for coordinate in itertools.product(*map(range, mesh)):
        at = coordinate.__getitem__
        size, offset = _utils._compute_local_shape_and_global_offset(shape, mesh, at, theirs)
        found.append(Box.at(offset, size))
    return found


def _theirs(placement: Placement, rank: int) -> Any:
    from torch.distributed.tensor import placement_types

    if isinstance(placement, Shard):
        return placement_types.Shard(placement.dim % rank)
    return placement_types.Replicate()


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 17), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    dims = st.integers(-len(shape), len(shape) - 1)
    kinds = st.one_of(st.builds(Shard, dims), st.just(Replicate()))
    return shape, mesh, tuple(draw(kinds) for _ in mesh)


def layout_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...], target: str
) -> dict[int, set[Box]]:
    whole = Box.whole(shape)
    chunk = Chunk(whole, Extent("f", 0, (4,) * len(shape)), 0)
    one = TensorEntry("w", ("w",), BY_NAME["float32"], shape, (chunk,))
    placed = PlacedTensors(Mesh.of(mesh), {"w": placements})
    layout = FORMATS[target].lay_out(
        Catalog("dcp", {"w": one}, {}, {}), Request("r", placed=placed)
    )
    return by_rank(layout.files)["w"]


@pytest.mark.parametrize("target", ["dcp", "dcp-safetensors"])
@settings(max_examples=150, deadline=None)
@given(case=cuts())
def test_chunks_are_those_of_torchs_dtensor(target: str, case: Any) -> None:
    shape, mesh, placements = case
    written = layout_of(shape, mesh, placements, target)
    boxes = [box for ranks in written.values() for box in ranks]
    assert len(boxes) == len(set(boxes)), "a replica is written once"
    expected = torch_boxes(shape, mesh, placements)
    if math.prod(shape):
        assert set(boxes) == {box for box in expected if box.volume}
        assert all(expected[rank] == box for rank, ranks in written.items() for box in ranks)
    else:
        assert boxes == [Box.whole(shape)]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(2, 4))
def test_fsdp2_over_tensor_parallelism_cuts_as_it_does(rows: int, dp: int, tp: int) -> None:
    written = layout_of((rows,), (dp, tp), (StridedShard(0, tp), Shard(0)), "dcp")
    for rank, boxes in written.items():
        held = _chunk(_chunk(torch.arange(rows), tp, rank % tp), dp, rank // tp)
        found = [i for box in boxes for i in range(box.lo[0], box.hi[0])]
        assert found == held.tolist()
    assert sum(box.volume for boxes in written.values() for box in boxes) == rows


def _chunk(values: torch.Tensor, count: int, index: int) -> torch.Tensor:
    parts = values.chunk(count) if len(values) else ()
    return parts[index] if index < len(parts) else values[:0]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_box_is_written_once_by_a_rank_that_holds_it(
    policy: str, mesh: str, source: Path, out: Path
) -> None:
    report = reshard(source, out / "r", mesh, policy=policy, to="dcp")
    shapes = {name: entry.shape for name, entry in open_checkpoint(source).catalog.tensors.items()}
    for name, ranks in ours(report).items():
        boxes = [box for held in ranks.values() for box in held]
        assert len(boxes) == len(set(boxes))
        assert sum(box.volume for box in boxes) == math.prod(shapes[name])
        expected = torch_boxes(shapes[name], report.mesh.shape, report.choices[name].placements)
        for rank, held in ranks.items():
            assert held <= {expected[rank]} or not math.prod(shapes[name])


def test_each_rank_has_one_file(source: Path, out: Path) -> None:
    report = reshard(source, out / "r", "2x4", policy="fsdp", to="dcp")
    ranks = [file.rank for file in report.files if file.rank is not None]
    assert ranks == list(range(8))
    assert sorted(p.name for p in (out / "r").iterdir()) == sorted(f.path for f in report.files)
    assert report.files[-1].path == ".metadata"


def test_replicas_are_spread_over_the_ranks(out: Path) -> None:
    state = {f"w{i}": torch.ones(100) for i in range(8)}
    dcp.save(state, checkpoint_id=out / "s", no_dist=True)
    report = reshard(out / "s", out / "r", "4", policy="replicate")
    sizes = {file.rank: file.nbytes for file in report.files if file.rank is not None}
    assert sorted(sizes) == [0, 1, 2, 3]
    assert max(sizes.values()) < 1.05 * min(sizes.values())


def test_a_replica_is_written_by_the_rank_with_the_fewest_bytes(out: Path) -> None:
    dcp.save({"cut": torch.ones(5, 100), "whole": torch.ones(50)}, checkpoint_id=out / "s")
    report = reshard(out / "s", out / "r", "2", rules=("whole=Replicate()",), policy="fsdp")
    assert {name: sorted(ranks) for name, ranks in ours(report).items()} == {
        "cut": [0, 1],  # three rows, and two
        "whole": [1],
    }


# Rank files, as torch loads them


@pytest.mark.parametrize(("mesh", "rules"), RULES, ids=str)
def test_rank_files_hold_dtensors(
    mesh: str, rules: tuple[str, ...], source: Path, truth: dict[str, Bits], out: Path
) -> None:
    report = reshard(source, out / "r", mesh, rules=rules, policy="fsdp", to="rank-local")
    whole = TENSORS_OF["dcp"](source)
    for rank in range(report.mesh.size):
        loaded = TENSORS_OF["torch-save"](out / "r" / f"checkpoint_{rank}.pt")
        assert loaded.keys() == whole.keys()
        for name, tensor in loaded.items():
            assert tuple(tensor.shape) == tuple(whole[name].shape)
            assert tensor.dtype == whole[name].dtype
            if hasattr(tensor, "placements"):
                assert tuple(tensor.device_mesh.shape) == report.mesh.shape
                assert tensor.device_mesh.mesh_dim_names == report.mesh.names


@pytest.mark.parametrize(
    ("mesh", "names"), [("3", ("fsdp",)), ("dp=3", ("dp",)), ("2x2", None)], ids=str
)
def test_the_sources_dims_keep_their_names(
    mesh: str, names: tuple[str, ...] | None, out: Path
) -> None:
    source = case("rank_verl").path / "global_step_5" / "actor"
    assert reshard(source, out / "r", mesh).mesh.names == names
    state = torch.load(next((out / "r").glob("model_*_0.pt")), weights_only=False)
    verl = ("ddp", "fsdp")  # what verl's own files have for two dims
    assert state["one"].device_mesh.mesh_dim_names == (names or verl)


# Without writing


def test_a_dry_run_writes_nothing(source: Path, out: Path) -> None:
    report = prepared(source, out / "r", "2x4").report
    assert list(out.iterdir()) == []
    assert sum(file.nbytes for file in report.files) == report.write_bytes
    assert len(report.rank_bytes) == 8
    assert report.read_bytes > 0


def test_a_dry_run_says_what_is_in_the_way(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = prepared(source, out / "no" / "r", "2")
    monkeypatch.setattr(transfer_module, "plan_digest", lambda *plan: pytest.fail("hashed"))
    (out / "no").write_text("")
    assert planned.obstacle() == f"{out}/no: not a folder to write into"
    (out / "no").unlink()
    assert planned.obstacle() is None
    assert list(out.iterdir()) == []
    (out / "no").mkdir()
    (out / "no" / "r").mkdir()
    assert "r already exists; --overwrite" in (planned.obstacle() or "")


def test_the_dry_run_is_what_is_written(source: Path, out: Path) -> None:
    planned = prepared(source, out / "r", "2x4", policy="hsdp")
    planned.run()
    sizes = {path.name: path.stat().st_size for path in (out / "r").iterdir()}
    assert sizes == {file.path: file.nbytes for file in planned.report.files}


@pytest.mark.parametrize(
    ("mesh", "name"), [("2x4", "ckpt-2x4"), ("8", "ckpt-8"), ("dp=2,tp=2", "ckpt-2x2")]
)
def test_the_target_is_named_after_the_mesh(mesh: str, name: str, source: Path) -> None:
    assert prepared(source, None, mesh).report.target == source.with_name(name)


@pytest.mark.parametrize(("named", "beside"), [("ckpt", "ckpt-8"), ("ckpt/..", ""), (".", "")])
def test_the_target_is_named_as_the_source_is(
    named: str, beside: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = out / "run" / ("ckpt" if beside else "")
    shutil.copytree(case("dcp_base").path, folder)
    (folder / "ckpt").mkdir(exist_ok=True)
    monkeypatch.chdir(out / "run")
    target = prepared(Path(named), None, "8").report.target
    assert target == (Path(beside) if beside else out / "run-8")


def test_what_a_rank_will_hold(source: Path, out: Path) -> None:
    whole = prepared(source, out / "r", "1").report.rank_bytes[0]
    assert prepared(source, out / "r", "2x2", policy="replicate").report.rank_bytes == (whole,) * 4
    scalars = 8 + 4
    sharded = prepared(source, out / "r", "3", policy="fsdp").report.rank_bytes
    assert sum(sharded) == whole + 2 * scalars


# State of a rank


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("keep", {f"rank@rank{rank}" for rank in range(4)}),
        ("drop", set()),
        ("0", {"rank"}),
        ("1", {"rank"}),
    ],
)
def test_state_that_differs_between_ranks(what: str, names: set[str], out: Path) -> None:
    one = case("rank_experimental")
    reshard(one.path, out / "r", "3", to="dcp", rank_state=what)
    objects = open_checkpoint(out / "r").catalog.objects
    assert {name for name in objects if name.startswith("rank")} == names
    if what in "01":
        assert objects["rank"].value == int(what)
    assert of_the_model(read_back("dcp", out / "r")) == one.truth


def test_it_stops_with_the_list_where_asked(out: Path) -> None:
    with pytest.raises(Unsupported, match="1 value of the source differs between ranks: rank"):
        prepared(case("rank_experimental").path, out / "r", "3", rank_state="stop")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("rank_experimental", "7"),
        ("rank_experimental", "some"),
        ("rank_experimental", ""),
        ("dcp_fsdp2", "some"),
        ("dcp_fsdp2", ""),
    ],
)
def test_a_word_for_it_that_means_nothing(name: str, what: str, out: Path) -> None:
    with pytest.raises(UsageError, match="--rank-state"):
        prepared(case(name).path, out / "r", "3", rank_state=what)


# Refusals


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"to": "onnx"}, UsageError, "unknown format"),
        ({"policy": "zero"}, UsageError, "unknown policy"),
        ({"rules": ("nothing=Shard(0)",)}, UsageError, "matches no tensor"),
        ({"rules": ("*.w=Shard(0),Shard(0)",)}, UsageError, "1 dims|has 2 placements"),
    ],
)
def test_refused(more: Any, error: Any, words: str, source: Path, out: Path) -> None:
    with pytest.raises(error, match=words):
        prepared(source, out / "r", "2", **more)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("place", ["ckpt", "ckpt/inside", "."])
def test_the_target_lies_apart(place: str, source: Path, out: Path) -> None:
    shutil.copytree(source, out / "ckpt")
    with pytest.raises(UsageError, match="must not contain one another"):
        prepared(out / "ckpt", out / place, "2")


def test_an_existing_target_is_kept(source: Path, out: Path) -> None:
    reshard(source, out / "r", "2")
    before = tree(out)
    with pytest.raises(Unsupported, match="already exists"):
        reshard(source, out / "r", "3")
    assert tree(out) == before
    reshard(source, out / "r", "3", overwrite=True)
    assert [p.name for p in out.iterdir()] == ["r"]
    assert len(list((out / "r").glob("*.distcp"))) == 3


def test_ranks_that_contradict_one_another_are_named(out: Path) -> None:
    one = case("rank_differing")
    with pytest.raises((Unsupported, Damaged), match="differ"):
        reshard(one.path, out / "r", "2")
    assert list(out.iterdir()) == []


def tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# Proof


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def spot(report: ReshardReport, name: str, file_name: str) -> int:
    """Where the data of a tensor begins in a file."""
    file = next(file for file in report.files if file.path == file_name)
    offset = 0
    for part in file.parts:
        if getattr(part, "name", None) == name and part.nbytes:
            return offset
        offset += part.nbytes
    raise LookupError(name)


@pytest.fixture
def damaging(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Flip a bit of a staged file once it is written, before it is verified."""
    real = stage_module.run

    def arrange(file: str, at: int) -> None:
        def run(work: Any, folder: Path, *rest: Any) -> None:
            real(work, folder, *rest)
            flip(folder / file, at)

        monkeypatch.setattr(stage_module, "run", run)

    return arrange


COPIES = [
    ("dcp", "fsdp", "__1_0.distcp"),
    ("dcp-safetensors", "fsdp", "shard-00002-model-00001-of-00001.safetensors"),
    ("rank-local", "fsdp", "checkpoint_1.pt"),
    ("rank-local", "replicate", "checkpoint_0.pt"),
    ("rank-local", "replicate", "checkpoint_1.pt"),
]


@pytest.mark.parametrize(
    ("target", "policy", "file"), [row for row in COPIES if row[0] in WRITERS], ids=str
)
def test_what_is_not_what_it_should_be_never_counts(
    target: str, policy: str, file: str, source: Path, out: Path, damaging: Callable[..., None]
) -> None:
    ready = prepared(source, out / "r", "2", policy=policy, to=target)
    damaging(file, spot(ready.report, "model.w", file))
    with pytest.raises(TransferError, match=r"model\.w"):
        ready.run()
    assert not (out / "r").exists()


def test_once_it_was_wrong_it_can_be_written_anew(
    source: Path, out: Path, damaging: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint of the error holds: ``--resume`` ends with the right bytes."""
    ready = prepared(source, out / "r", "2", policy="fsdp", to="dcp")
    damaging("__1_0.distcp", spot(ready.report, "model.w", "__1_0.distcp"))
    with pytest.raises(TransferError) as error:
        ready.run()
    monkeypatch.undo()
    resume = error.value.hint is not None and "--resume" in error.value.hint
    reshard(source, out / "r", "2", policy="fsdp", to="dcp", resume=resume)
    assert read_back("dcp", out / "r") == read_back("dcp", source)


def test_without_proof_it_is_taken_as_it_is(
    source: Path, out: Path, damaging: Callable[..., None]
) -> None:
    ready = prepared(source, out / "r", "2", to="dcp", verify=False)
    damaging("__1_0.distcp", spot(ready.report, "model.w", "__1_0.distcp"))
    ready.run()
    assert read_back("dcp", out / "r") != read_back("dcp", source)


# Loading through torch (one rank; several are in test_torchrun)

CHECKED = ("dcp", "dcp-safetensors", "rank-local")


@pytest.mark.parametrize("target", CHECKED)
def test_the_check_finds_one_flipped_bit(target: str, source: Path, out: Path) -> None:
    ready = prepared(source, out / "r", "1", to=target)
    ready.run()
    check_loads(ready, Ranks())
    file = next(f.path for f in ready.report.files if f.rank == 0)
    flip(out / "r" / file, spot(ready.report, "model.w", file) + 4 * 8)
    with pytest.raises(TransferError, match=r"model\.w: rank 0 .* first at \[1, 1\]"):
        check_loads(ready, Ranks())


@pytest.mark.parametrize("target", CHECKED)
def test_the_check_finds_a_file_that_torch_cannot_load(
    target: str, source: Path, out: Path
) -> None:
    ready = prepared(source, out / "r", "1", to=target)
    ready.run()
    file = next(f.path for f in ready.report.files if f.rank == 0)
    (out / "r" / file).write_bytes(b"nothing of the kind")
    with pytest.raises(TransferError, match="torch cannot load it"):
        check_loads(ready, Ranks())


def test_the_check_needs_the_ranks_of_the_mesh(source: Path, out: Path) -> None:
    with pytest.raises(Unsupported, match="the mesh has 4 ranks, but 1 are running") as error:
        require_loadable(prepared(source, out / "r", "2x2"), Ranks())
    assert "--nproc-per-node 4" in (error.value.hint or "")


@pytest.mark.parametrize("target", [name for name in WRITERS if name not in CHECKED])
def test_the_check_names_what_it_cannot_load(target: str, source: Path, out: Path) -> None:
    with pytest.raises(Unsupported, match=target):
        require_loadable(prepared(source, out / "r", "1", to=target), Ranks())


# The command line


def test_the_report_is_json(source: Path, out: Path) -> None:
    done = run_command("reshard", source, out / "r", "--mesh", "dp=2,tp=2", "--json", "--no-fsync")
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "ckptool.reshard/2"
    assert report["mesh"] == {"shape": [2, 2], "names": ["dp", "tp"]}
    assert report["written"] is True
    assert {row["name"] for row in report["tensors"]} == set(read_back("dcp", source))
    assert sum(row["bytes"] for row in report["files"]) == report["write_bytes"]
    assert len(report["rank_bytes"]) == 4


def test_the_source_is_the_current_folder(source: Path, out: Path) -> None:
    shutil.copytree(source, out / "step-5")
    done = run_command("reshard", "--mesh", "2x2", "--no-fsync", cwd=out / "step-5")
    assert done.code == 0, done.stderr
    assert "step-5-2x2" in done.stdout
    assert read_back("dcp", out / "step-5-2x2") == read_back("dcp", source)


def test_a_rule_is_shown_as_it_was_said(
    source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = prepared(source, out / "r", "2", rules=("*[/a-z]*=Shard(0)",))
    show_reshard(planned.with_costs())
    assert "Shard(0)  (rule *[/a-z]*)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--mesh", "0"), 2),
        (("--mesh", "2", "--shard", "nothing=Shard(0)"), 2),
        ((), 2),
        (("--mesh", "2", "--from", "hf"), 3),
        (("--mesh", "2", "--check"), 4),
    ],
    ids=str,
)
def test_exit_codes(words: tuple[str, ...], code: int, source: Path, out: Path) -> None:
    done = run_command("reshard", source, out / "r", *words)
    assert done.code == code, done.stderr
    assert done.stderr.startswith("error: ")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=str)
def test_of_a_refused_check_only_a_dry_run_shows_the_plans_notes(
    more: tuple[str, ...], out: Path
) -> None:
    """They come before the error; what is not begun has none."""
    words = ("--mesh", "2", "--to", "dcp", "--rank-state", "drop", "--check", *more)
    done = run_command("reshard", case("accelerate_folders").path, out / "r", *words)
    assert done.code == 4, done.stderr
    notes, _, _ = done.stderr.partition("error: --check: the mesh has")
    assert notes.startswith("note: ") if more else not notes
    assert list(out.iterdir()) == []


def test_a_source_that_is_not_there(out: Path) -> None:
    assert run_command("reshard", out / "missing", out / "r", "--mesh", "2").code == 3


def test_the_module_is_what_the_command_calls() -> None:
    assert reshard_module.prepare_reshard is prepare_reshard


@pytest.mark.parametrize("part", [None, "1/1"])
def test_missing_folders_around_a_target_are_made(
    source: Path, out: Path, part: str | None
) -> None:
    target = out / "a" / "b" / "r"
    arguments = ["reshard", str(source), str(target), "--mesh", "2", "-q"]
    result = CliRunner().invoke(app, [*arguments, *(["--part", part] if part else [])])
    assert result.exit_code == 0, result.output
    assert [path.name for path in (out / "a").iterdir()] == ["b"]
    if part is None:
        assert [path.name for path in (out / "a" / "b").iterdir()] == ["r"]
