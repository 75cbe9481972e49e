"""Any checkpoint onto any mesh: bit-equal, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    GOOD,
    TENSORS_OF,
    Case,
    bits,
    by_name,
    case,
    convert_to,
    read_back,
)
from reshard_runs import MESHES, RULES, WRITERS, prepared, reshard, source

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.transfer import transfer as transfer_module
from ckptool.core.sharding.placement import POLICIES
from ckptool.engine.check.digest import digests
from ckptool.engine.read.tensors import TensorSource
from ckptool.errors import Damaged, Unsupported, UsageError

OF_A_RANK = ("extra_state.", "random_states.", "rank")


OF_A_TRAINER = ("verl", "accelerate")


REOPENED = [n for n, row in WRITERS.items() if not row.loading.rules() and n not in OF_A_TRAINER]
"""Targets that take tensors of any name, cut in any way."""


LOADED = [name for name in TENSORS_OF if name in WRITERS]
"""Targets that a loader of their own framework reads here."""


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


PLACED = ("dcp_fsdp2", "dcp_fsdp2_tp", "dcp_hsdp", "dcp_replicated", "rank_base", "hf_sharded")


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, REOPENED[at % len(REOPENED)]) for n, name in enumerate(PLACED) for at in (n, n + 1)],
)
def test_and_back(name: str, target: str, out: Path) -> None:
    """From mesh to mesh, by placements that were kept, and back again.

    To two of the targets each, in turns: from the first step on it is a target that is read.
    """
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


CHOICES = (*POLICIES, None)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("policy", CHOICES)
def test_every_policy(policy: str | None, mesh: str, source: Path, out: Path) -> None:
    """To one target each, in turns: it knows nothing of the policy that cuts for it."""
    target = REOPENED[(CHOICES.index(policy) + MESHES.index(mesh)) % len(REOPENED)]
    report = reshard(source, out / "r", mesh, policy=policy, to=target)
    before, after = contents(source), contents(out / "r")
    carried = {n: v for n, v in before.items() if n in after}
    assert after == carried
    if target != "dcp-safetensors":
        assert after == before
    assert report.target_format == target


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
    assert (planned.obstacle() or "").startswith(f"{out}/no: not a folder to write into; ")
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


def test_bytes_mean_the_same_before_and_after(out: Path) -> None:
    """What a dry run alone knows, such as the gaps that are read, has keys of its own."""
    torch.save({"w": torch.ones(64, 64)[:, ::4]}, out / "m.pt")
    before, after = (
        ckptool.reshard(out / "m.pt", out / "r", mesh="2", to="dcp", dry_run=dry_run).to_dict()
        for dry_run in (True, False)
    )
    same = [key for key in before if key.endswith("_bytes") and key != "free_bytes"]
    assert {key: before[key] for key in same} == {key: after[key] for key in same}
    assert before["over_read"] > 1


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


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"to": "onnx"}, UsageError, "unknown format"),
        ({"to": "hf"}, UsageError, "(?s)'hf': not written for a mesh.*`ckptool convert SRC DST"),
        ({"policy": "zero"}, UsageError, "unknown policy"),
        ({"rules": ("nothing=Shard(0)",)}, UsageError, "matches none of"),
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
