"""A manifest proves every faithful copy, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beginning import AtTheBeginning
from conftest import GOOD, Case, bits, by_name, case, convert_to, taken
from hypothesis import given
from hypothesis import strategies as st
from recipes.damage import DAMAGE
from safetensors.torch import load_file, save_file

from ckptool.commands.options.question import Question
from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.options.verify import ManifestOptions, VerifyOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.verify.compare.values import canonical_text, value_text
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.manifest.build import build_manifest
from ckptool.commands.verify.manifest.check import check_manifest
from ckptool.commands.verify.manifest.schema import SCHEMA, read_manifest
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.errors import Damaged, NotFound, Unrecognized, Unsupported

UNREAD = {"odd_kinds", "rank_partial"}
"""Cases that hold tensors whose bytes are in no tensor's digest."""


QUICK = VerifyOptions(quick=True)


def write(
    path: Path,
    manifest: Path,
    verify: VerifyOptions = QUICK,
    progress: Progress = UNWATCHED,
    *,
    overwrite: bool = False,
) -> VerifyReport:
    question = Question(check=verify, manifest=ManifestOptions(overwrite=overwrite))
    return build_manifest(path, manifest, question, progress)


def prove(path: Path, manifest: Path, **options: Any) -> VerifyReport:
    return check_manifest(path, manifest, Question(rewrite=rewriting(**options)))


def rewriting(**options: Any) -> RewriteOptions:
    selection = taken(Selection, options)
    return RewriteOptions(selection, **options)


def codes(report: VerifyReport) -> set[str]:
    return {finding.code for finding in report.findings}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Where a manifest may be written."""
    return tmp_path / "manifest.json"


# What is proved


@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_a_checkpoint_is_proved_by_its_own_manifest(one: Case, manifest: Path) -> None:
    assert write(one.path, manifest).ok
    report = prove(one.path, manifest)
    assert report.ok
    assert report.summary.startswith("OK: matches")
    recorded = json.loads(manifest.read_text())["tensors"]
    for name, (dtype, shape, data) in one.truth.items():
        proof = {"dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}
        assert recorded[name] == proof
    deep = manifest.with_name("deep.json")
    assert write(one.path, deep, verify=VerifyOptions()).ok
    assert deep.read_text() == manifest.read_text()


def test_a_manifest_costs_two_readings(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the files, their checksums and their values, one of the tensors in their own order."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.rand(1 << 20), "b": torch.rand(300, 2000).t()}, path)
    read = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(os_preadv(descriptor, buffers, offset))
        return read[-1]

    os_preadv = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    assert write(path, manifest, verify=VerifyOptions(workers=1)).ok
    assert 2 <= sum(read) / path.stat().st_size < 2.1


def test_a_file_that_changes_meanwhile_has_no_manifest(
    copy_of: Callable[[str], Path], manifest: Path
) -> None:
    folder = copy_of("dcp_base")
    times = []

    def begun() -> None:
        times.append(1)
        if len(times) == 2:
            os.utime(folder / "__1_0.distcp", (1, 1))

    report = write(folder, manifest, VerifyOptions(), progress=AtTheBeginning(begun))
    assert "file-changed" in codes(report)
    assert not manifest.exists()


def test_a_changed_file_is_one_finding_with_its_tensors(
    copy_of: Callable[[str], Path], manifest: Path
) -> None:
    folder = copy_of("hf_shards")
    assert write(folder, manifest).ok
    path = min(folder.glob("model-*.safetensors"))
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = load_file(path).keys()
    path.write_bytes(data[:start] + bytes(byte ^ 1 for byte in data[start:]))
    report = prove(folder, manifest)
    (finding,) = report.findings
    assert (finding.code, finding.file, finding.tensor) == ("manifest-differs", path.name, None)
    assert {part.tensor for part in finding.affected} == tensors


@pytest.mark.parametrize("target", ["safetensors", "torch-save", "dcp", "dcp-safetensors"])
@pytest.mark.parametrize(
    "name", ["dcp_fsdp2_tp", "rank_base", "dcp_zoo", "legacy_zoo", "hf_sharded"]
)
def test_a_copy_in_any_format_is_proved(name: str, target: str, out: Path, manifest: Path) -> None:
    assert write(case(name).path, manifest).ok
    path = out / ("m.pt" if target == "torch-save" else "m")
    convert_to(target, case(name).path, path)
    report = prove(path, manifest)
    assert {f.code for f in report.findings if f.severity.value == "error"} == set()
    assert report.ok
    if target == "torch-save":
        assert " file" not in report.summary.partition(": ")[2]


@pytest.mark.parametrize("mesh", ["1", "3", "4", "2x2"])
@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "rank_base"])
def test_a_copy_on_any_mesh_is_proved(name: str, mesh: str, out: Path, manifest: Path) -> None:
    write(case(name).path, manifest)
    prepare_reshard(case(name).path, out / "m", ReshardOptions(parse_mesh(mesh))).run()
    assert prove(out / "m", manifest).ok


# What is not


def changed(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> Path:
    torch.manual_seed(3)
    content = {"w": torch.randn(8, 8), "b": torch.zeros(4), "step": 7, "names": ["a", ("b", 1.0)]}
    change(content)
    torch.save(content, tmp_path / "state.pt")
    return tmp_path / "state.pt"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda c: c["w"].__setitem__((3, 4), 0.0), "manifest-differs"),
        (lambda c: c["b"].neg_(), "manifest-differs"),
        (lambda c: c.update(w=c["w"].reshape(4, 16)), "manifest-differs"),
        (lambda c: c.update(b=c["b"].int()), "manifest-differs"),
        (lambda c: c.pop("b"), "manifest-missing"),
        (lambda c: c.update(more=torch.ones(1)), "manifest-extra"),
        (lambda c: c.update(step=8), "manifest-differs"),
        (lambda c: c.update(names=["a", ("b", 1)]), "manifest-differs"),
        (lambda c: c.pop("step"), "manifest-missing"),
        (lambda c: c.update(epoch=1), "manifest-extra"),
    ],
)
def test_what_differs_is_not_proved(
    change: Callable[[dict[str, Any]], None], code: str, tmp_path: Path, manifest: Path
) -> None:
    write(changed(lambda content: None, tmp_path), manifest)
    report = prove(changed(change, tmp_path), manifest)
    assert not report.ok
    assert code in codes(report)


@pytest.mark.parametrize("name", [n for n, one in DAMAGE.items() if one.answer != "fine"])
def test_damage_is_never_proved(name: str, copy_of: Callable[[str], Path], manifest: Path) -> None:
    """Not even what no reader can see, nor what loses nothing: a changed file is said to be one."""
    damage = DAMAGE[name]
    folder = copy_of(damage.source)
    assert write(folder, manifest).ok
    damage.apply(folder)
    if damage.answer == "Unrecognized":
        with pytest.raises(Unrecognized):
            prove(folder, manifest)
        return
    report = prove(folder, manifest)
    assert not report.ok


def test_a_changed_file_is_named_though_its_tensors_are_proved(
    copy_of: Callable[[str], Path], manifest: Path
) -> None:
    folder = copy_of("dcp_base")
    write(folder, manifest)
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[data.index(b"ZZZZ")] = ord("Y")
    (folder / "__0_0.distcp").write_bytes(data)
    report = prove(folder, manifest)
    assert not report.ok
    (finding,) = [f for f in report.findings if f.code == "manifest-differs"]
    assert finding.file == "__0_0.distcp"


@pytest.mark.parametrize("name", sorted(UNREAD))
def test_what_no_digest_holds_is_proved_by_its_files_alone(
    name: str, copy_of: Callable[[str], Path], manifest: Path
) -> None:
    folder = copy_of(name)
    report = write(folder, manifest)
    assert "manifest-incomplete" in codes(report)
    assert prove(folder, manifest).ok
    file = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = file.read_bytes()
    file.write_bytes(data + b"\0" if data[:2] != b"PK" else data.replace(b"ZZZZ", b"YZZZ", 1))
    assert not prove(folder, manifest).ok


def test_values_that_a_format_cannot_hold_are_not_proved_unless_excluded(
    tmp_path: Path, manifest: Path
) -> None:
    write(changed(lambda content: None, tmp_path), manifest)
    content = torch.load(tmp_path / "state.pt")
    save_file({"w": content["w"], "b": content["b"]}, tmp_path / "m.safetensors")
    assert "values-unsupported" in codes(prove(tmp_path / "m.safetensors", manifest))
    report = prove(tmp_path / "m.safetensors", manifest, drop=("step", "names*"))
    assert report.ok
    assert "excluded: 2 values of" in report.summary


# The document


def test_a_damaged_checkpoint_gets_no_manifest(
    copy_of: Callable[[str], Path], manifest: Path
) -> None:
    folder = copy_of("dcp_base")
    DAMAGE["data_flipped"].apply(folder)
    report = write(folder, manifest)
    assert not report.ok
    assert not manifest.exists()


def test_nothing_is_overwritten_unless_asked(manifest: Path) -> None:
    manifest.write_text("mine")
    with pytest.raises(Unsupported, match="already exists"):
        write(case("dcp_base").path, manifest)
    with pytest.raises(Unsupported, match="not a manifest, and is not replaced"):
        write(case("dcp_base").path, manifest, overwrite=True)
    assert manifest.read_text() == "mine"
    manifest.unlink()
    assert write(case("dcp_base").path, manifest).ok
    assert write(case("dcp_base").path, manifest, overwrite=True).ok


EDITS: dict[str, Callable[[str], str]] = {
    "a digest": lambda text: re.sub('"sha256": "....', '"sha256": "0000', text, count=1),
    "a shape": lambda text: text.replace('"shape": [', '"shape": [1, ', 1),
    "a name": lambda text: text.replace('"w"', '"v"', 1),
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "another schema": lambda text: text.replace(SCHEMA, "ckptool.manifest/2"),
    "no schema": lambda text: "{}",
    "a list": lambda text: "[]",
    "no digest of its own": lambda text: json.dumps(
        {k: v for k, v in json.loads(text).items() if k != "sha256"}
    ),
    "no file": lambda text: signed(text, "files", None),
    "no tensors": lambda text: signed(text, "tensors", []),
    "a tensor without digest": lambda text: signed(text, "tensors", {"w": {"dtype": "float32"}}),
    "a digest with a line end": lambda text: signed(
        text, "tensors", {"w": {"dtype": "float32", "shape": [], "sha256": "0" * 64 + "\n"}}
    ),
    "an unknown element type": lambda text: signed(
        text, "tensors", {"w": {"dtype": "float33", "shape": [], "sha256": "0" * 64}}
    ),
    "a negative shape": lambda text: signed(
        text, "tensors", {"w": {"dtype": "float32", "shape": [-1], "sha256": "0" * 64}}
    ),
    "a value of another digest": lambda text: signed(
        text, "values", {"v": {"json": "1", "sha256": "0" * 64}}
    ),
    "NaN": lambda text: text.replace('"format"', '"x": NaN, "format"'),
}


def signed(text: str, key: str, value: Any) -> str:
    """The manifest with one part replaced (or removed), and the right digest of its own."""
    content = json.loads(text)
    del content["sha256"]
    content[key] = value
    if value is None:
        del content[key]
    digest = hashlib.sha256(canonical_text(content).encode()).hexdigest()
    return json.dumps(content | {"sha256": digest})


@pytest.mark.parametrize("edit", EDITS)
def test_a_manifest_that_was_changed_or_lacks_something_proves_nothing(
    edit: str, manifest: Path
) -> None:
    write(case("dcp_base").path, manifest)
    before = manifest.read_text()
    manifest.write_text(EDITS[edit](before))
    assert manifest.read_text() != before
    with pytest.raises(Damaged, match=r"manifest\.json"):
        prove(case("dcp_base").path, manifest)


def test_a_manifest_that_is_not_there_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        prove(case("dcp_base").path, tmp_path / "none.json")


def test_anyone_can_check_an_entry_with_standard_tools(tmp_path: Path, manifest: Path) -> None:
    convert_to("safetensors", case("dcp_base").path, tmp_path / "m.safetensors")
    write(tmp_path / "m.safetensors", manifest)
    recorded = json.loads(manifest.read_text())
    data = (tmp_path / "m.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])["w"]["data_offsets"]
    command = (
        f"tail -c +$(({length} + 8 + {begin} + 1)) m.safetensors"
        f" | head -c $(({end} - {begin})) | sha256sum; sha256sum m.safetensors"
    )
    told = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    tensor, file = (line.split()[0] for line in told.stdout.splitlines())
    assert tensor == recorded["tensors"]["w"]["sha256"]
    assert file == recorded["files"]["m.safetensors"]["sha256"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
        ),
        max_leaves=12,
    ),
    st.data(),
)
def test_canonical_json_is_equal_only_for_equal_values(value: Any, data: st.DataObject) -> None:
    other = data.draw(st.just(value) | st.integers() | st.booleans() | st.floats())
    texts = value_text(value, "v"), value_text(other, "v")
    assert (texts[0] == texts[1]) == (repr_of(value) == repr_of(other))
    assert json.loads(texts[0]) is not ...
    assert canonical_text(json.loads(texts[0])) == texts[0]


def repr_of(value: Any) -> str:
    """Distinguishes 1, 1.0 and True, and -0.0; does not see the order of dicts."""
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{k!r}:{repr_of(v)}" for k, v in value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({','.join(map(repr_of, value))})"
    return repr(value)


def test_the_digest_is_of_what_torch_has_in_memory(tmp_path: Path, manifest: Path) -> None:
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6).t()
    torch.save({"w": tensor}, tmp_path / "m.pt")
    write(tmp_path / "m.pt", manifest)
    digest = hashlib.sha256(bits(tensor)[2]).hexdigest()
    assert read_manifest(manifest).tensors["w"].sha256 == digest


def test_strict_makes_what_is_unproved_a_failure(manifest: Path) -> None:
    options = VerifyOptions(strict=True)
    assert not write(case("odd_kinds").path, manifest, verify=options).ok
    assert not manifest.exists()
