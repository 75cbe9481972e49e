"""A side file is read with the files that it was written with, and with no others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import convert_to
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.commands.inspect.report import inspect_readable
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import Damaged, Problem
from ckptool.serialization.archive import write
from ckptool.serialization.archive.write import lay_out_archive, read_identity

FORMS = {"safetensors": ("m.safetensors", "m.extra.pt"), "hf": ("m", "m/model.extra.pt")}
FORMS["dcp-safetensors"] = FORMS["hf"]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save(form: str, folder: Path, **values: object) -> tuple[Path, Path]:
    """A checkpoint of a tensor and values in a folder; where its side file is."""
    folder.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(2), **values}, folder / "source.pt")
    name, side = FORMS[form]
    convert_to(form, folder / "source.pt", folder / name)
    return folder / name, folder / side


def unmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write side files as earlier versions did."""
    from ckptool.formats import side_file

    def plain(value: object, partner: bytes) -> tuple[object, str]:
        return lay_out_archive(value), ""

    def split(*args: object) -> object:
        fitting, files, _, notes = real(*args)  # type: ignore[arg-type]
        return fitting, files, {}, notes

    real = side_file.split_side
    monkeypatch.setattr(side_file, "lay_out_side", plain)
    for module in ("safetensors", "safetensors.huggingface", "safetensors.dcp_shards"):
        monkeypatch.setattr(f"ckptool.formats.{module}.split_side", split)


def test_it_is_read_with_its_own(form: str, tmp_path: Path) -> None:
    place, side = save(form, tmp_path / "a", step=1)
    assert open_checkpoint(place).catalog.objects["step"].value == 1
    assert verify(place, VerifyOptions(strict=True)).ok
    assert "ckptool" not in str(open_checkpoint(place).catalog.info)
    moved = tmp_path / f"b{place.suffix}"
    place.rename(moved)
    if place.suffix:
        side.rename(tmp_path / "b.extra.pt")
    assert open_checkpoint(moved).catalog.objects["step"].value == 1


@pytest.mark.parametrize("other", [5, torch.zeros(2, dtype=torch.complex128)], ids=type)
def test_one_of_two_that_have_a_name_keeps_its_own(
    other: object, form: str, tmp_path: Path
) -> None:
    place, _ = save(form, tmp_path / "a", **{"a.b": torch.ones(3), "a": {"b": other}})
    catalog = open_checkpoint(place).catalog
    assert catalog.tensors["a.b"].shape == (3,)
    assert "a.b@2" in catalog.tensors | catalog.objects
    convert_to("dcp", place, tmp_path / "dcp")
    with ckptool.open(tmp_path / "dcp") as checkpoint:
        assert torch.equal(checkpoint["a.b"], torch.ones(3))
        found = checkpoint["a.b@2"]
        assert type(found) is type(other)


def test_another_programs_is_left_out_with_a_note(form: str, tmp_path: Path) -> None:
    place, side = save(form, tmp_path / "a")
    assert not side.exists()
    torch.save({"step": 7, "v": torch.ones(1)}, side)
    catalog = open_checkpoint(place).catalog
    assert {*catalog.tensors, *catalog.objects} == {"w"}
    notes = [note for note in catalog.notes if isinstance(note, Problem)]
    (note,) = [note for note in notes if note.file == side.name]
    assert note.code == "file-unused"
    assert note == f"not read: {side.name}: ckptool did not write it"
    report = verify(place, VerifyOptions())
    assert report.ok
    assert [f.file for f in report.findings if f.code == "file-unused"] == [side.name]


@pytest.mark.parametrize("values", [{}, {"step": 2}], ids=["without", "with"])
@pytest.mark.parametrize("of_torch", [True, False])
def test_that_of_another_checkpoint_is_refused(
    of_torch: bool, values: dict[str, int], form: str, tmp_path: Path
) -> None:
    if of_torch and not values:
        pytest.skip("a foreign file beside a checkpoint without one: left out")
    place, side = save(form, tmp_path / "a", **values)
    shutil.copy(save(form, tmp_path / "b", step=1)[1], side)
    if of_torch:
        torch.save({"step": 1}, side)
    with pytest.raises(Damaged, match=f"{side.name}: not the side file that was written") as caught:
        open_checkpoint(place)
    assert caught.value.message.code == "side-file-mismatch"
    report = verify(place, VerifyOptions())
    assert [f.file for f in report.findings if f.severity.value == "error"] == [side.name]
    assert report.tensors == 1, "the others are read"
    side.unlink()
    catalog = open_checkpoint(place).catalog
    assert [*catalog.tensors] == ["w"]
    assert verify(place, VerifyOptions()).ok


def test_one_that_is_missing_is_a_warning(form: str, tmp_path: Path) -> None:
    place, side = save(form, tmp_path / "a", step=1)
    side.unlink()
    message = f"{side.name} is missing: without it the non-tensor values, and the tensors of types"
    (note,) = [note for note in open_checkpoint(place).catalog.notes if "missing: " in note]
    assert note.startswith(message)
    assert verify(place, VerifyOptions()).ok
    report = verify(place, VerifyOptions(strict=True))
    assert not report.ok
    assert [f.file for f in report.findings if f.code == "side-file-missing"] == [side.name]
    again = tmp_path / f"again{place.suffix}"
    made = convert_to(form, place, again)
    assert note in made.notes
    assert not any("missing: " in note for note in open_checkpoint(again).catalog.notes)


def test_files_written_anew_by_another_program_are_not_its_own(tmp_path: Path) -> None:
    place, side = save("safetensors", tmp_path / "a", step=1)
    save_file(load_file(place), place)
    with pytest.raises(Damaged, match="not the side file"):
        open_checkpoint(place)
    side.unlink()
    assert open_checkpoint(place).catalog.notes == ()


def test_those_of_earlier_versions_are_read(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        unmark(patched)
        place, side = save(form, tmp_path / "a", step=1)
    identity = read_identity(open_checkpoint(place).source, side.name)
    assert identity is not None
    assert not write.is_marked(identity)
    assert open_checkpoint(place).catalog.objects["step"].value == 1
    assert verify(place, VerifyOptions(strict=True)).ok


def test_torch_opens_it_with_plain_values_of_all_kinds(form: str, tmp_path: Path) -> None:
    """torch.save itself calls the global ``bytes`` for empty ones, which weights_only refuses."""
    values = {
        "bytes": [b"", b"\x80\xff", {"k": b""}, (b"",)],
        "array": [bytearray(), bytearray(b"x")],
        "sets": [set(), {1}],
        "numbers": [1j, 2**70, -(2**70), float("inf")],
    }
    place, side = save(form, tmp_path, **values)
    loaded = torch.load(side, weights_only=True)
    assert loaded == values
    assert ckptool.compare(place, tmp_path / "source.pt").ok


def test_equal_checkpoints_have_equal_side_files(form: str, tmp_path: Path) -> None:
    """Or parts of one run, and a resumed one, would not fit together."""
    places = [save(form, tmp_path / name, step=1) for name in "ab"]
    one, other = (Path(side).read_bytes() for _, side in places)
    assert one == other
    third = save(form, tmp_path / "c", step=2)[1].read_bytes()
    assert third[:40] == one[:40]
    assert third != one


@pytest.mark.parametrize("earlier", [True, False])
def test_one_that_cannot_be_read_is_damage(
    earlier: bool, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote it: it may be the checkpoint's own, cut short."""
    with monkeypatch.context() as patched:
        if earlier:
            unmark(patched)
        place, side = save(form, tmp_path / "a", step=1)
    side.write_bytes(side.read_bytes()[:500])
    with pytest.raises(Damaged, match=f"{side.name}: no zip directory at the end"):
        open_checkpoint(place)
    codes = [finding.code for finding in verify(place, VerifyOptions()).findings]
    assert "zip-structure" in codes
    assert "side-file-mismatch" not in codes


@pytest.mark.parametrize("own", [True, False], ids=["cut short", "of another"])
def test_the_others_are_salvaged_without_it(own: bool, form: str, tmp_path: Path) -> None:
    place, side = save(form, tmp_path / "a", step=1)
    other = save(form, tmp_path / "b", step=2)[1].read_bytes()
    side.write_bytes(side.read_bytes()[:500] if own else other)
    report = ckptool.salvage(place, tmp_path / "left")
    assert not report.complete
    assert side.name in str(report.problems)
    assert [*open_checkpoint(tmp_path / "left").catalog.tensors] == ["w"]


def test_its_values_are_salvaged_where_no_header_can_be_read(tmp_path: Path) -> None:
    place, _ = save("hf", tmp_path / "a", step=1)
    (weights,) = place.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:40])
    codes = {finding.code: finding.file for finding in verify(place, VerifyOptions()).findings}
    assert "side-file-mismatch" not in codes
    assert inspect_readable(place).catalog.objects["step"].value == 1
