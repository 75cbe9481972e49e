"""Similar files of ranks: reading one by another gives the result of reading it alone."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptool.errors import CkptoolError, Refusal
from ckptool.serialization.archive.read import OpenArchive
from ckptool.serialization.state_dict import alike
from ckptool.serialization.state_dict.alike import AlikeFiles
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf, ShareLeaf, read_file_leaves
from ckptool.serialization.state_dict.values import same_value
from ckptool.storage.virtual.memory import MemoryFiles

SHAPE = (3, 4)


def in_memory(contents: dict[str, bytes]) -> MemoryFiles:
    return MemoryFiles({name: memoryview(data) for name, data in contents.items()})


def saved(rank: int, state: Callable[[Any, int], dict[str, Any]]) -> bytes:
    """What torch saves of a rank of a 3 x 4 mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=12)
    try:
        mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=("dp", "tp"))
        stream = io.BytesIO()
        torch.save(state(mesh, rank), stream)
        return stream.getvalue()
    finally:
        dist.destroy_process_group()


def layers(mesh: Any, rank: int) -> dict[str, Any]:
    """Weights on the mesh and on a slice of it, a plain one, and values."""
    local = torch.full((2, 4), float(rank))
    cut = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False)
    sliced = DTensor.from_local(local + 1, mesh["tp"], [Shard(0)], run_check=False)
    again = DTensor.from_local(local + 2, mesh, [Shard(0), Replicate()], run_check=False)
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}]
    plain = torch.arange(4.0)
    return {"a": cut, "b": sliced, "c": {"d": again}, "norm": plain, "groups": groups, "step": 7}


@pytest.fixture(scope="module")
def ranks() -> dict[str, bytes]:
    """What four of the ranks save."""
    return {f"rank{rank}.pt": saved(rank, layers) for rank in (0, 1, 6, 11)}


@pytest.fixture(autouse=True)
def small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read small files by one another, too."""
    monkeypatch.setattr(alike, "_LEAST", 0)


def read_alone(source: MemoryFiles, file: str) -> dict[str, Leaf] | str:
    """What a file holds, or what is wrong with it."""
    try:
        return read_file_leaves(source, file)
    except CkptoolError as error:
        return str(error.message)


def read_behind(source: MemoryFiles, first: Iterable[str], file: str) -> dict[str, Leaf] | str:
    """The same, read behind other files."""
    files = AlikeFiles(source)
    for one in first:
        files.read(one, rank_state=False)
    try:
        return files.read(file, rank_state=False)
    except CkptoolError as error:
        return str(error.message)


def is_same(one: dict[str, Leaf] | str, other: dict[str, Leaf] | str) -> bool:
    """Whether all names, paths, places, meshes, ranks and values are the same."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return list(one) == list(other) and all(is_same_leaf(one[n], other[n]) for n in one)


def is_same_leaf(one: Leaf, other: Leaf) -> bool:
    """Whether two leaves say the same."""
    a, b = one.value, other.value
    if isinstance(a, PlainLeaf | ShareLeaf):
        return one == other
    if isinstance(a, Refusal):
        return isinstance(b, Refusal) and str(a) == str(b) and one.path == other.path
    return same_value(a, b) and (one.path, one.note) == (other.path, other.note)


def count_full_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose pickles are read in full from now on."""
    full: list[str] = []
    read = OpenArchive.read

    def counted(archive: OpenArchive) -> Any:
        full.append(archive.file)
        return read(archive)

    monkeypatch.setattr(OpenArchive, "read", counted)
    return full


def test_ranks_of_a_mesh(ranks: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    source = in_memory(ranks)
    alone = {file: read_alone(source, file) for file in ranks}
    full = count_full_reads(monkeypatch)
    files = AlikeFiles(source)
    for file in ranks:
        assert is_same(files.read(file, rank_state=False), alone[file])
    assert full == ["rank0.pt"]
    held = [
        leaves["a"].value.share.rank for leaves in alone.values() if not isinstance(leaves, str)
    ]
    assert held == [0, 1, 6, 11]


@pytest.mark.parametrize(
    "what",
    [
        lambda mesh, rank: {"rank": rank, **layers(mesh, rank)},
        lambda mesh, rank: {f"of {rank % 10}": rank, **layers(mesh, rank)},
        lambda mesh, rank: layers(mesh, rank) | {"norm": torch.zeros(4 + rank)},
        lambda mesh, rank: layers(mesh, rank) | {"tied": torch.zeros(40)[rank : rank + 4]},
    ],
    ids=["a value of the rank", "a name of the rank", "another size", "another place"],
)
def test_what_differs_beside_the_mesh(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = in_memory({f"rank{rank}.pt": saved(rank, what) for rank in (1, 2, 3)})
    full = count_full_reads(monkeypatch)
    files = AlikeFiles(source)
    read = {file: files.read(file, rank_state=False) for file in source.files}
    assert full == [*source.files]
    for file, leaves in read.items():
        assert is_same(leaves, read_alone(source, file))


def with_pickle(archive: bytes, change: Callable[[bytes], bytes], drop: str = "") -> bytes:
    """The archive with another pickle, and without a record."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if not drop or not name.endswith(drop):
                new.writestr(name, change(data) if name.endswith("/data.pkl") else data)
    return stream.getvalue()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_changed_pickles(ranks: dict[str, bytes], data: st.DataObject) -> None:
    """Any byte may differ, those near the numbers of the mesh above all."""

    def change(pickle: bytes) -> bytes:
        changed = bytearray(pickle)
        mesh = pickle.index(b"_rank")
        places = st.one_of(st.integers(mesh, mesh + 80), st.integers(0, len(pickle) - 2))
        for at in data.draw(st.lists(places, min_size=1, max_size=3)):
            changed[at] = data.draw(st.one_of(st.integers(0, 12), st.integers(0, 255)))
        return bytes(changed)

    same = with_pickle(ranks["rank0.pt"], bytes)
    changed = with_pickle(ranks["rank1.pt"], change)
    source = in_memory({"0": same, "1": with_pickle(ranks["rank1.pt"], bytes), "changed": changed})
    first = data.draw(st.sampled_from([["0"], ["0", "1"], ["1", "0"]]))
    assert is_same(read_behind(source, first, "changed"), read_alone(source, "changed"))


def test_a_storage_that_is_missing(ranks: dict[str, bytes]) -> None:
    source = in_memory(
        {
            "whole": with_pickle(ranks["rank0.pt"], bytes),
            "less": with_pickle(ranks["rank1.pt"], bytes, drop="/data/0"),
        }
    )
    found = read_behind(source, ["whole"], "less")
    assert is_same(found, read_alone(source, "less"))
    assert not isinstance(found, str)
    assert isinstance(found["a"].value, Refusal)


def test_more_differing_bytes_than_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of groups fill all bytes that are looked for; what differs behind them is seen, too."""
    monkeypatch.setattr(alike, "_MOST_DIFFERING", 64)

    def state(mesh: Any, rank: int) -> dict[str, Any]:
        mesh._dim_group_names = [f"{at}" * 40 for at in mesh.get_coordinate()]
        part = torch.zeros(40)[rank // 5 : rank // 5 + 4]
        return {**layers(mesh, rank), "part": part, "last": 100 + rank // 5}

    source = in_memory({f"rank{rank}.pt": saved(rank, state) for rank in (0, 1, 4, 9)})
    full = count_full_reads(monkeypatch)
    files = AlikeFiles(source)
    read = {file: files.read(file, rank_state=False) for file in source.files}
    assert full == ["rank0.pt", "rank9.pt"]
    for file, leaves in read.items():
        assert is_same(leaves, read_alone(source, file))


def text(value: bytes) -> bytes:
    """What pushes a text."""
    return b"X" + len(value).to_bytes(4, "little") + value


KEYS = b"".join(b"K%cNs" % number for number in (5, 6, *range(200, 256)))
"""What stores numbers into a dict."""
GETATTR = b"cbuiltins\ngetattr\nctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"


@pytest.mark.parametrize(
    ("program", "values"),
    [
        (
            lambda value: text(b"more") + b"}" + KEYS + b"K" + value + b"Nss",
            [b"\x05", b"\x06", b"\x63"],
        ),
        (lambda value: text(value) + text(b"system") + b"\x930", [b"ox", b"oy", b"os"]),
        (
            lambda value: GETATTR + text(value) + b"\x86R0",
            [b"ProcessGroupState", b"ProcessGroupState", b"ProcessGroupStatX"],
        ),
        (lambda value: b"S'\xe9'\n0K" + value + b"0", [b"\x01", b"\x02", b"\x03"]),
        (
            lambda value: b"c_codecs\nencode\n" + text(value) + text(b"latin1") + b"\x86R0",
            [b"abc", b"abd", b"\xe4\xb8\xad"],
        ),
    ],
    ids=["one key more", "a module", "getattr", "a text that is no ASCII", "what is encoded"],
)
def test_programs_that_hide_what_a_literal_does(
    ranks: dict[str, bytes], program: Callable[[bytes], bytes], values: list[bytes]
) -> None:
    """What is dropped, or written over, must not differ without a word."""

    def appended(pickled: bytes, value: bytes) -> bytes:
        return pickled[:-1] + program(value) + b"."

    source = in_memory(
        {
            value.hex() + file: with_pickle(data, partial(appended, value=value))
            for (file, data), value in zip(ranks.items(), values, strict=False)
        }
    )
    *first, last = source.files
    assert is_same(read_behind(source, first, last), read_alone(source, last))
