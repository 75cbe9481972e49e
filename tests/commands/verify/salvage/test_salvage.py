"""verify --salvage: the output is right, losses are named, and nothing is guessed."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Bits, bits, case, flat, load_torch, read_back
from recipes.damage import DAMAGE
from verify.salvage.salvaged import contents, damaged_copy, salvage

from ckptool.errors import CkptoolError, Unsupported

HARMFUL = [n for n, one in DAMAGE.items() if one.answer == "Damaged"]


WITHOUT_NAMES = {"zero_optimizers_lost"}
"""Damage after which no file says what the tensors are called."""


@pytest.mark.parametrize("name", HARMFUL)
def test_what_is_written_is_right_and_the_rest_is_named(
    name: str, copy_of: Callable[[str], Path], out: Path
) -> None:
    source = damaged_copy(name, copy_of)
    truth, before = case(DAMAGE[name].source).truth, contents(source)
    try:
        report = salvage(source, out / "m")
    except Unsupported:
        assert not list(out.iterdir())
        return
    written = read_back("dcp", out / "m")
    assert {n for n in written if n in truth and written[n] != truth[n]} == set()
    if not report.unknown and name not in WITHOUT_NAMES:
        assert truth.keys() - written.keys() <= report.lost.keys()
    assert not report.complete
    assert contents(source) == before


@pytest.mark.parametrize("target", ["m", "m.pt", "m.safetensors"])
def test_a_whole_checkpoint_loses_nothing(target: str, out: Path) -> None:
    report = salvage(case("dcp_base").path, out / target)
    assert report.complete
    assert report.tensors == len(case("dcp_base").truth)
    assert (out / target).exists()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("data_flipped", {"plain"}),
        ("chunk_gap", {"w"}),
        ("rank_flipped", {"w"}),
        ("replicas_differ", {"plain"}),
        ("dtype_unknown", {"blocks.0.down.weight"}),
        ("shape_lies", {"blocks.0.down.weight"}),
        ("offsets_negative", {"blocks.0.down.weight"}),
        ("bytes_shared", {"embed.weight", "three"}),
    ],
)
def test_one_wrong_tensor_costs_no_other(
    name: str, lost: set[str], copy_of: Callable[[str], Path], out: Path
) -> None:
    report = salvage(damaged_copy(name, copy_of), out / "m")
    assert report.lost.keys() == lost
    truth = case(DAMAGE[name].source).truth
    assert read_back("dcp", out / "m") == {n: truth[n] for n in truth if n not in report.lost}


def test_one_wrong_entry_of_a_shard_costs_no_other(
    copy_of: Callable[[str], Path], out: Path
) -> None:
    """Of a file that an index lists too; the entry is blamed, once, not what it leads to."""
    folder = copy_of("hf_shards")
    file = folder / "model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype":"BF16"', b'"dtype":"BF17"', 1))
    report = salvage(folder, out / "m")
    ((lost, why),) = report.lost.items()
    assert "unknown element type 'BF17'" in why
    assert not report.problems
    truth = case("hf_shards").truth
    assert read_back("dcp", out / "m") == {n: truth[n] for n in truth if n != lost}


def test_a_damaged_replica_is_taken_from_another_rank(
    copy_of: Callable[[str], Path], out: Path
) -> None:
    folder = copy_of("rank_base")
    file = folder / "checkpoint_0.pt"
    plain = load_torch_plain(folder / "checkpoint_1.pt")
    data = bytearray(file.read_bytes())
    at = data.index(plain["plain"][2])
    data[at] ^= 1
    file.write_bytes(data)
    report = salvage(folder, out / "m")
    assert "plain" not in report.lost
    assert read_back("dcp", out / "m")["plain"] == case("rank_base").truth["plain"]


def load_torch_plain(path: Path) -> dict[str, Bits]:
    """The plain tensors of a rank's file, by torch."""
    from torch.distributed.tensor import DTensor

    state = torch.load(path, weights_only=True)
    return {n: bits(t) for n, t in flat(state).items() if not isinstance(t, DTensor)}


def test_metadata_that_was_never_renamed_is_used(copy_of: Callable[[str], Path], out: Path) -> None:
    folder = copy_of("dcp_base")
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    report = salvage(folder, out / "m")
    assert not report.lost
    assert read_back("dcp", out / "m") == case("dcp_base").truth


@pytest.mark.parametrize("name", ["dcp_base", "dcp_fsdp2_tp", "dcp_file_an_item", "torch_2_1_dcp"])
def test_items_are_found_without_metadata(
    name: str, copy_of: Callable[[str], Path], out: Path
) -> None:
    folder = copy_of(name)
    (folder / ".metadata").unlink()
    report = salvage(folder, out / "m.pt")
    items = items_of(folder)
    written = {n: bits(t) for n, t in torch.load(out / "m.pt").items() if torch.is_tensor(t)}
    assert written == {n: bits(item) for n, item in items.items() if torch.is_tensor(item)}
    assert report.tensors + report.values == len(items)
    assert any("names" in line for line in report.unknown)
    assert not report.complete


def items_of(folder: Path) -> dict[str, Any]:
    """Every item of the data files, by torch: at each place where an archive can be opened."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.distcp")):
        data, position, number = file.read_bytes(), 0, 0
        while position < len(data):
            end = data.index(b"PK\x05\x06", position) + 22
            (folder / "item").write_bytes(data[position:end])
            assert zipfile.is_zipfile(folder / "item")
            found[f"{file.stem}.item{number}"] = load_torch(folder / "item")
            position, number = end, number + 1
    return found


def test_items_around_a_hole_are_found_without_metadata(
    copy_of: Callable[[str], Path], out: Path
) -> None:
    folder = copy_of("dcp_base")
    (folder / ".metadata").unlink()
    file = folder / "__1_0.distcp"
    data = file.read_bytes()
    items = {n: item for n, item in items_of(folder).items() if n.startswith("__1_0")}
    ends = [found.end() + 18 for found in re.finditer(b"PK\x05\x06", data)]
    middle = (ends[0] + ends[1]) // 2
    file.write_bytes(
        data[:middle] + bytes(100) + data[middle + 100 : ends[2]] + data[ends[2] : -30]
    )
    report = salvage(folder, out / "m.pt")
    written = torch.load(out / "m.pt")
    kept = [bits(t) for n, t in written.items() if n.startswith("__1_0") and torch.is_tensor(t)]
    assert 0 < len(kept) < len(items)
    assert all(one in [bits(t) for t in items.values() if torch.is_tensor(t)] for one in kept)
    assert any("__1_0" in line for line in (*report.problems, *report.lost.values()))


def state() -> dict[str, Any]:
    torch.manual_seed(5)
    first = torch.randn(100, 100)
    return {
        "first": first,
        "tied": first,
        "view": first[3:7, ::2],
        "empty": torch.empty(0, 3),
        "step": 5,
        "half": torch.randn(77).bfloat16(),
        "nested": {"count": torch.arange(1000), "names": ["a", "b"]},
        "last": torch.randn(300, 100),
    }


@pytest.mark.parametrize("share", [0.999, 0.99, 0.6, 0.3, 0.28, 0.1, 0.02])
def test_a_file_that_was_cut_keeps_what_lies_before(share: float, out: Path) -> None:
    torch.save(state(), out / "whole.pt")
    data = (out / "whole.pt").read_bytes()
    (out / "cut.pt").write_bytes(data[: int(len(data) * share)])
    report = salvage(out / "cut.pt", out / "saved.pt")
    written, truth = flat(torch.load(out / "saved.pt")), flat(state())
    assert {n: bits(t) for n, t in written.items()} == {n: bits(truth[n]) for n in written}
    assert truth.keys() - written.keys() == report.lost.keys()
    assert torch.load(out / "saved.pt")["step"] == 5
    assert ("last" in written) == (share > 0.995)


@pytest.mark.parametrize("nbytes", [0, 3, 40, 200])
def test_a_file_without_a_whole_pickle_holds_nothing(nbytes: int, out: Path) -> None:
    torch.save(state(), out / "whole.pt")
    (out / "cut.pt").write_bytes((out / "whole.pt").read_bytes()[:nbytes])
    with pytest.raises(CkptoolError):
        salvage(out / "cut.pt", out / "saved.pt")
    assert not (out / "saved.pt").exists()


def test_a_flipped_byte_before_the_cut_is_not_part_of_what_is_kept(out: Path) -> None:
    torch.save(state(), out / "whole.pt")
    data = bytearray((out / "whole.pt").read_bytes())
    data[5000] ^= 1
    (out / "cut.pt").write_bytes(data[: len(data) // 2])
    report = salvage(out / "cut.pt", out / "saved.pt")
    assert {"first", "tied", "view", "last"} <= report.lost.keys()
    assert "nested.count" not in report.lost


def test_bytes_without_a_checksum_are_reported_to_be_unproved(out: Path) -> None:
    assert salvage(case("zip_without_crc").path, out / "m.pt").unproved
    assert not salvage(case("module_state").path, out / "n.pt").unproved
