"""verify --against: equal in any layout; differences are found and placed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CASES, GOOD, Case, by_name, case, convert_to
from recipes.damage import DAMAGE
from safetensors.torch import save_file
from typer.testing import CliRunner
from verify.compare.compared import against, codes, state

from ckptool.cli.app import app
from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh
from ckptool.errors import Unsupported, UsageError
from ckptool.formats import FORMATS

NOT_CARRIED = {"odd_kinds", "rank_partial"}
"""Cases with values that no target can hold: convert names them and leaves them out."""


@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_every_checkpoint_is_the_same_as_itself(one: Case) -> None:
    if one.unread:
        assert "tensor-not-compared" in codes(against(one.path, one.path))
    report = against(one.path, one.path, drop=one.unread)
    assert report.verify.ok
    assert report.verify.summary.startswith("EQUAL")
    assert report.verify.tensors >= len(one.truth)


CARRIED = [one for one in GOOD if one.name not in NOT_CARRIED]


TARGETS = ("safetensors", "dcp", "torch-save", "dcp-safetensors")


@pytest.mark.parametrize("one", CARRIED, ids=by_name)
def test_a_conversion_is_the_same_both_ways(one: Case, out: Path) -> None:
    """To one of four targets each, in turns."""
    target = TARGETS[CARRIED.index(one) % len(TARGETS)]
    path = out / ("m.pt" if target == "torch-save" else "m")
    convert_to(target, one.path, path)
    for pair in ((one.path, path), (path, one.path)):
        report = against(*pair)
        assert codes(report) <= {
            "values-unsupported",
            "value-missing",
            "value-extra",
            "value-not-written",
            "companion-missing",
            *(["metadata-differs"] if not FORMATS[target].writing.has_metadata else []),
        }
        assert report.verify.tensors >= len(one.truth)


@pytest.mark.parametrize("mesh", ["1", "3", "2x2"])
@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "rank_base", "hf_sharded"])
def test_another_mesh_is_the_same(name: str, mesh: str, out: Path) -> None:
    prepare_reshard(case(name).path, out / "m", ReshardOptions(parse_mesh(mesh))).run()
    report = against(case(name).path, out / "m")
    assert report.verify.ok
    assert report.verify.tensors >= len(case(name).truth)


def set_element(
    name: str, index: tuple[int, ...], value: float
) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name][index] = value

    return change


@pytest.mark.parametrize(
    ("name", "index", "value", "largest"),
    [
        ("wide", (0, 0), 100.0, None),
        ("wide", (299, 1999), 100.0, None),
        ("half", (6, 4), 8.0, None),
        ("nan", (1,), -0.0, 0.0),
        ("nan", (0,), 1.0, "no number"),
        ("nan", (2,), float("inf"), float("inf")),
        ("count", (1, 2), 8, 3),
        ("flag", (1,), True, 1),
        ("scalar", (), 2.75, 0.25),
    ],
)
def test_one_element_is_found_and_placed(
    name: str,
    index: tuple[int, ...],
    value: float,
    largest: float | str | None,
    saved: Callable[..., tuple[Path, Path]],
) -> None:
    report = against(*saved(set_element(name, index, value)))
    assert not report.verify.ok
    (found,) = report.differing
    assert (found.name, found.differing, found.first) == (name, 1, index)
    assert (found.a.file, found.b.file) == ("one.safetensors", "other.safetensors")
    if largest is None:
        largest = abs(state()[name].double()[index].item() - value)
    assert found.largest == (None if largest == "no number" else largest)


def test_all_differences_of_a_tensor_are_counted(saved: Callable[..., tuple[Path, Path]]) -> None:
    pair = saved(lambda tensors: tensors["wide"].mul_(2))
    report = against(*pair)
    (found,) = report.differing
    assert found.differing == 600_000
    assert found.first == (0, 0)
    assert found.largest == state()["wide"].abs().max().item()


def test_the_rank_and_file_of_a_difference_are_told(out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    convert_to("torch-save", source, out / "m.pt")
    content = torch.load(out / "m.pt")
    content["model"]["embed.weight"][-1, -1] += 1
    torch.save(content, out / "m.pt")
    (found,) = against(source, out / "m.pt").differing
    here, there = found.a, found.b
    assert here.file == f"__{here.rank}_0.distcp"
    assert there.file == "m.pt"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: t.pop("half"), "tensor-missing"),
        (lambda t: t.update(more=torch.ones(1)), "tensor-extra"),
        (lambda t: t.update(count=torch.arange(6).reshape(3, 2)), "shape-differs"),
        (lambda t: t.update(half=t["half"].float()), "dtype-differs"),
    ],
)
def test_structure_is_compared(
    change: Callable[[Any], None], code: str, saved: Callable[..., tuple[Path, Path]]
) -> None:
    report = against(*saved(change))
    assert not report.verify.ok
    assert codes(report) == {code}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda s: s.update(step=8), "value-differs"),
        (lambda s: s.update(step=7.0), "value-differs"),
        (lambda s: s.update(betas=[0.9, 0.95]), "value-differs"),
        (lambda s: s.pop("step"), "value-missing"),
        (lambda s: s.update(more="text"), "value-extra"),
        (lambda s: s.update(step=torch.ones(1)), "tensor-extra"),
    ],
)
def test_values_are_compared(change: Callable[[Any], None], code: str, tmp_path: Path) -> None:
    content: dict[str, Any] = {"w": torch.ones(2), "step": 7, "betas": (0.9, 0.95), "nan": [np.nan]}
    torch.save(content, tmp_path / "one.pt")
    change(content)
    torch.save(content, tmp_path / "other.pt")
    report = against(tmp_path / "one.pt", tmp_path / "other.pt")
    assert not report.verify.ok
    assert codes(report) == {code}


def test_values_that_the_other_format_cannot_hold_are_a_difference_unless_excluded(
    tmp_path: Path,
) -> None:
    torch.save({"w": torch.ones(2), "step": 7}, tmp_path / "one.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    report = against(tmp_path / "one.pt", tmp_path / "other.safetensors")
    assert not report.verify.ok
    assert codes(report) == {"values-unsupported"}
    report = against(tmp_path / "one.pt", tmp_path / "other.safetensors", drop=("step",))
    assert report.verify.ok
    assert "not compared: 1 value of" in report.verify.summary


def test_what_a_scan_does_not_read_is_never_equal(out: Path) -> None:
    partial, unread = case("rank_partial").path, case("rank_partial").unread
    with pytest.raises(Unsupported, match="partial sums"):
        convert_to("dcp", partial, out / "m")
    convert_to("dcp", partial, out / "m", drop=unread)
    assert codes(against(partial, partial)) == {"tensor-not-compared"}
    assert codes(against(partial, out / "m")) == {"tensor-not-compared"}
    assert codes(against(out / "m", partial)) == {"tensor-not-compared"}


def test_two_that_have_nothing_in_common_are_not_the_same(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "b.safetensors")
    report = against(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert codes(report) == {"tensor-missing", "tensor-extra", "nothing-compared"}


@pytest.mark.parametrize("name", [n for n, one in DAMAGE.items() if one.answer == "Damaged"])
def test_what_is_damaged_is_never_the_same(name: str, copy_of: Callable[[str], Path]) -> None:
    """On either side; where only bytes that both lack are damaged, their checksum shows it."""
    folder = copy_of(DAMAGE[name].source)
    DAMAGE[name].apply(folder)
    good = case(DAMAGE[name].source).path
    for pair in ((folder, good), (good, folder), (folder, folder)):
        report = against(*pair)
        assert not report.verify.ok
        assert report.verify.findings


@pytest.mark.parametrize("name", [n for n, one in DAMAGE.items() if one.answer == "silent"])
def test_what_no_file_can_show_another_checkpoint_shows(
    name: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(DAMAGE[name].source)
    DAMAGE[name].apply(folder)
    report = against(folder, case(DAMAGE[name].source).path)
    assert codes(report) == {"tensor-differs"}


@pytest.mark.parametrize("one", [one for one in CASES if one.expect == "conflict"], ids=by_name)
def test_ranks_that_contradict_one_another_are_not_the_same(one: Case) -> None:
    assert codes(against(one.path, one.path)) == {"ranks-disagree"}
    assert against(one.path, one.path, per_rank=True).verify.ok


def test_a_whole_name_of_either_side_is_no_glob(tmp_path: Path) -> None:
    torch.save({"x0": torch.ones(2), "x[0]": torch.ones(2), "y": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"x0": torch.ones(2), "y": torch.ones(2)}, tmp_path / "b.pt")
    for one, other in (("a.pt", "b.pt"), ("b.pt", "a.pt")):
        report = against(tmp_path / one, tmp_path / other, drop=("x[0]",))
        assert (report.ok, report.verify.tensors) == (True, 2)


def test_select_drop_and_rename_choose_what_is_compared(out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    convert_to("safetensors", source, out / "m", select=("model.*",), rename=(r"^model\.=net.",))
    names = {"select": ("model.*",), "rename": (r"^model\.=net.",)}
    assert against(source, out / "m", **names).verify.ok
    assert against(source, out / "m", drop=("optim*", "step"), rename=names["rename"]).verify.ok
    assert not against(source, out / "m").verify.ok


def test_a_choice_applies_to_both_sides(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(1), "b": torch.zeros(1)}, tmp_path / "other.safetensors")
    report = against(tmp_path / "one.safetensors", tmp_path / "other.safetensors", select=("a",))
    assert report.verify.ok
    assert codes(report) == {"excluded"}


def test_what_the_other_has_more_of_the_choice_is_a_difference(tmp_path: Path) -> None:
    save_file({"m.a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"m.a": torch.ones(1), "m.b": torch.ones(1)}, tmp_path / "other.safetensors")
    report = against(tmp_path / "one.safetensors", tmp_path / "other.safetensors", select=("m.*",))
    assert codes(report) == {"tensor-extra"}


@pytest.mark.parametrize("name", ["dcp_fsdp2", "dcp_hsdp", "torch_2_4_dcp", "module_state"])
def test_the_models_alone_are_compared(name: str, out: Path) -> None:
    source = case(name).path
    convert_to("safetensors", source, out / "m", model_only=True)
    for other in (out / "m", source):
        report = against(source, other, model_only=True)
        assert report.verify.ok
        assert report.verify.tensors


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_exit_codes_and_json(tmp_path: Path) -> None:
    shutil.copytree(case("dcp_base").path, tmp_path / "same")
    one = case("dcp_base").path
    assert run(one, "--against", tmp_path / "same").exit_code == 0
    result = run(one, "--against", case("dcp_hsdp").path, "--json")
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert content["schema"] == "ckptool.verify/2"
    assert content["ok"] is False
    assert content["against"]["format"] == "dcp"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--against", ".", "--quick"),
        ("--against", ".", "--manifest", "m"),
        ("--rtol", "0.1"),
        ("--cast",),
        ("--select", "a"),
        ("--rename", "a=b"),
        ("--against", ".", "--rtol", "inf"),
        ("--against", ".", "--atol", "nan"),
    ],
)
def test_what_is_reported_of_a_comparison_needs_one(arguments: tuple[str, ...]) -> None:
    result = run(case("dcp_base").path, *arguments)
    assert isinstance(result.exception, UsageError)


def test_each_side_is_read_as_the_format_that_is_told_for_it(tmp_path: Path) -> None:
    """Beside a ``.metadata`` of something else, a folder of safetensors is taken for DCP."""
    one, other = tmp_path / "one.pt", tmp_path / "other"
    other.mkdir()
    torch.save(state(), one)
    save_file(state(), other / "model.safetensors")
    (other / ".metadata").write_bytes(b"not DCP")
    command = ["verify", str(one), "--against", str(other)]
    assert CliRunner().invoke(app, command).exit_code == 1
    told = CliRunner().invoke(app, [*command, "--other-format", "hf"])
    assert told.exit_code == 0, told.output
    assert isinstance(
        CliRunner().invoke(app, [*command, "--other-format", "nothing"]).exception, UsageError
    )


def test_a_format_for_the_other_side_needs_one(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["verify", str(tmp_path), "--other-format", "dcp"])
    assert isinstance(told.exception, UsageError)
