"""Tensors and slices of them come out of every format unchanged."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOOD, Bits, Case, bits, by_name, case, inspect_one
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.extract import open_slices, read_values
from ckptool.commands.options.extract import ExtractOptions
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Damaged, Unsupported, UsageError

DCP = case("dcp_fsdp2_tp").path
MIXED = {
    "w": torch.arange(12.0).reshape(3, 4),
    "layers.0.q_proj.weight": torch.arange(6).reshape(2, 3),
    "layers.1.q_proj.weight": torch.arange(6).reshape(2, 3) + 6,
    "odd[0]": torch.ones(2),
    "bf16": torch.tensor([1.5, -2.0, float("nan")], dtype=torch.bfloat16),
    "fp8": torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
    "mask": torch.tensor([True, False]),
}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    save_file(MIXED, path)
    return path


def numbers(path: Path, name: str) -> Any:
    (read,) = read_values(open_slices(path, [name], ExtractOptions()))
    return read.numbers


def sliced(whole: Bits, index: Any) -> Bits:
    dtype, shape, data = whole
    size = len(data) // max(1, int(np.prod(shape)))
    part = np.frombuffer(data, f"V{size or 1}").reshape(shape)[index]
    return dtype, part.shape, part.tobytes()


@pytest.mark.parametrize("source", GOOD, ids=by_name)
def test_slices_of_every_format(source: Case, out: Path) -> None:
    known = {n: b for n, b in source.truth.items() if BY_NAME[b[0]].safetensors}
    asked = {n: "[1::2, ...]" if b[1] and b[1][0] > 1 else "" for n, b in known.items()}
    names = [f"{name}{text}" for name, text in asked.items()]
    ckptool.extract(source.path, names, out / "m.safetensors")
    found = {name: bits(tensor) for name, tensor in load_file(out / "m.safetensors").items()}
    expected = {n: sliced(b, np.s_[1::2]) if asked[n] else b for n, b in known.items()}
    assert found == expected


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("", np.s_[...]),
        ("[1]", np.s_[1]),
        ("[..., ::2]", np.s_[..., ::2]),
        ("[:2, 1:3]", np.s_[:2, 1:3]),
        ("[5:]", np.s_[5:]),
        ("[-1, -1]", np.s_[-1, -1]),
    ],
)
def test_a_npy_file_is_numpys(text: str, index: Any, mixed: Path, out: Path) -> None:
    ckptool.extract(mixed, f"w{text}", out / "w.npy")
    found, expected = np.load(out / "w.npy"), MIXED["w"].numpy()[index]
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(found, expected)


def test_names_are_whole_or_globs_or_part_of_one(mixed: Path, out: Path) -> None:
    assert numbers(mixed, "odd[0]").tolist() == [1.0, 1.0]
    assert numbers(mixed, "odd[0][1]") == 1.0
    assert numbers(mixed, "1.q_proj[0]").tolist() == [6, 7, 8]
    ckptool.extract(mixed, "layers.*[:, 0]", out / "q.safetensors")
    assert {n: t.tolist() for n, t in load_file(out / "q.safetensors").items()} == {
        "layers.0.q_proj.weight": [0, 3],
        "layers.1.q_proj.weight": [6, 9],
    }


@pytest.mark.parametrize(
    ("names", "words", "hint"),
    [
        (["q_proj"], "in 2 names: layers.0.q_proj.weight, layers.1", r"'\*q_proj\*'"),
        (["layers.2.q_proj.weight"], "no tensor named", "did you mean layers.[01].q_proj"),
        (["w[0]", "w[1]"], "w: requested twice", "one slice"),
        (["w[7]"], "index 7 is out of range", ""),
    ],
)
def test_names_that_are_none(names: list[str], words: str, hint: str, mixed: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        open_slices(mixed, names, ExtractOptions())
    assert re.search(hint, caught.value.hint or "")


@pytest.mark.parametrize("beside", [None, "ml_dtypes"], ids=str)
def test_what_numpy_cannot_hold_is_refused_with_what_can(
    beside: str | None, mixed: Path, out: Path
) -> None:
    if beside:
        pytest.importorskip(beside)  # it gives numpy the names of its types
    with pytest.raises(Unsupported, match="numpy has no bfloat16") as caught:
        ckptool.extract(mixed, "bf16", out / "w.npy")
    assert caught.value.hint == (
        "--dtype fp32 holds the same numbers; to keep the bits, write a .safetensors file"
    )
    ckptool.extract(mixed, "bf16", out / "w.npy", dtype="fp32")
    assert np.array_equal(np.load(out / "w.npy"), MIXED["bf16"].float().numpy(), equal_nan=True)
    ckptool.extract(mixed, "bf16", out / "w.safetensors")
    with safe_open(out / "w.safetensors", "pt") as file:
        assert bits(file.get_tensor("bf16")) == bits(MIXED["bf16"])


def test_a_cast_is_of_what_was_asked_for_whatever_part_it_is(out: Path) -> None:
    name = "optim.state.three.exp_avg"
    ckptool.extract(DCP, name, out / "m.npy", dtype="fp64")
    assert np.load(out / "m.npy").dtype == np.float64


def test_nothing_is_overwritten(mixed: Path, out: Path) -> None:
    target = out / "w.npy"
    target.write_text("mine")
    with pytest.raises(Unsupported, match="already exists") as caught:
        ckptool.extract(mixed, "w", target)
    assert "never overwrites" in str(caught.value.hint)
    assert target.read_text() == "mine"


@pytest.mark.parametrize(("name", "words"), [("w.txt", "must end in"), ("w.npy", "one array")])
def test_files_that_cannot_hold_it(name: str, words: str, mixed: Path, out: Path) -> None:
    with pytest.raises(UsageError, match=words):
        ckptool.extract(mixed, ["w", "mask"], out / name)
    assert not list(out.iterdir())


def test_only_the_bytes_that_are_asked_for_are_read(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = out / "large.pt"
    torch.save({"w": torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)}, large)
    read: list[int] = []
    pread = os.preadv

    def count(descriptor: int, buffers: Any, *rest: Any) -> int:
        read.append(sum(len(buffer) for buffer in buffers))
        return pread(descriptor, buffers, *rest)

    monkeypatch.setattr(os, "preadv", count)
    ckptool.extract(large, "w[3:5]", out / "w.npy", workers=1)
    assert np.array_equal(np.load(out / "w.npy"), np.arange(3072, 5120).reshape(2, 1024))
    assert 0 < sum(read) < 64 << 10


def test_what_ranks_disagree_on_is_damage() -> None:
    path = case("rank_differing").path
    (name, *_) = inspect_one(path).catalog.conflicts
    with pytest.raises(Damaged, match="differ in shape or type"):
        open_slices(path, [name], ExtractOptions())


# To look at


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["extract", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_small_slices_are_shown_in_full_and_of_large_ones_the_edges(tmp_path: Path) -> None:
    whole = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    save_file({"w": torch.from_numpy(whole)}, tmp_path / "w.safetensors")
    path = str(tmp_path / "w.safetensors")
    head, body = run(path, "w").split("\n", 1)
    assert head == "w  [100, 100]  fp32  39.1 KiB"
    assert body.rstrip("\n") == np.array2string(
        whole, threshold=1000, floatmode="unique", max_line_width=120
    )
    head, body = run(path, "w[0, :4]").split("\n", 1)
    assert (head, body) == ("w[0, :4]  [4] of [100, 100]  fp32  16 B", "[0. 1. 2. 3.]\n")


@pytest.mark.parametrize("words", [("--resume",), ("--budget", "1MiB")])
def test_options_of_a_file_need_one(words: tuple[str, ...], mixed: Path) -> None:
    done = CliRunner().invoke(app, ["extract", str(mixed), "w", *words])
    assert isinstance(done.exception, UsageError)
    assert f"{words[0]} is for a file that is written: it needs --out FILE" in str(done.exception)


def test_json_has_the_numbers(mixed: Path) -> None:
    found = json.loads(run(str(mixed), "bf16", "fp8", "mask[1:]", "--json"))
    assert found["schema"] == "ckptool.extract/2"
    assert [(t["name"], t["slice"], t["values"]) for t in found["tensors"]] == [
        ("bf16", "", [1.5, -2.0, "nan"]),
        ("fp8", "", [1.0, 448.0]),
        ("mask", "[1:]", [False]),
    ]


def test_complex_numbers_are_pairs_in_json(tmp_path: Path) -> None:
    state = {"c": torch.tensor([1 + 2j]), "h": torch.tensor([3 - 1j], dtype=torch.complex32)}
    torch.save(state, tmp_path / "c.pt")
    found = json.loads(run(str(tmp_path / "c.pt"), "c", "h", "--json"))
    assert [t["values"] for t in found["tensors"]] == [[[1.0, 2.0]], [[3.0, -1.0]]]


def test_a_value_whose_name_reads_like_a_slice_is_that_value(tmp_path: Path) -> None:
    torch.save({"v": torch.ones(3), "v[1]": 5}, tmp_path / "v.pt")
    with pytest.raises(UsageError, match=r"'v\[1\]': not a tensor, but a value"):
        open_slices(tmp_path / "v.pt", ["v[1]"], ExtractOptions())
