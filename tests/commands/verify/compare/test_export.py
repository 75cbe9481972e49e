"""An export is proved with exactly the options that it was made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import case, convert_to
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.errors import UsageError

MAP = """
name = "joined"
from = "mine"
to = "yours"

[dims]
q = 8
k = 4

[[rule]]
from = ["layers.{layer}.wq.weight [q wide]", "layers.{layer}.wk.weight [k wide]"]
to = "h.{layer}.qk.weight [(q + k) wide]"

[[rule]]
from = "layers.{layer}.up.weight [wide out]"
to = "h.{layer}.up.weight [out wide]"

[[rule]]
from = "norm.weight"
to = "ln.weight"
"""


def trained(folder: Path) -> Path:
    """A model under ``model.``, an optimizer's state and a step."""
    torch.manual_seed(5)
    weights = {"norm.weight": torch.randn(6)}
    for layer in range(3):
        for name, rows in (("wq", 8), ("wk", 4), ("up", 6)):
            weights[f"layers.{layer}.{name}.weight"] = torch.randn(rows, 6)
    moments = {str(n): {"exp_avg": torch.zeros_like(w)} for n, w in weights.items()}
    state = {"model": weights, "optimizer": {"state": moments}, "step": 7}
    torch.save(state, folder / "run.pt")
    (folder / "joined.toml").write_text(MAP)
    return folder / "run.pt"


def quantized(folder: Path) -> Path:
    """An FP8 weight in one block, with its scale, and a norm."""
    torch.manual_seed(6)
    weight = torch.randn(4, 6).to(torch.float8_e4m3fn)
    state = {"up.weight": weight, "up.weight_scale_inv": torch.rand(1, 1) + 1}
    save_file(state | {"norm.weight": torch.ones(3)}, folder / "q.safetensors")
    return folder / "q.safetensors"


EXPORTS: dict[str, dict[str, Any]] = {
    "model": {"model_only": True},
    "renamed": {"select": "model.*", "rename": [r"^model\.=net.", "norm=ln"]},
    "dropped": {"drop": ["optimizer.*", "step"], "strip_prefix": "model"},
    "cast": {"model_only": True, "dtype": "bf16"},
    "mapped": {"model_only": True, "map": "joined.toml"},
    "mapped and cast": {"model_only": True, "map": "joined.toml", "dtype": "bf16"},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return trained(tmp_path)


def export(source: Path, target: Path, options: dict[str, Any]) -> Path:
    ckptool.convert(source, target, to="safetensors", fsync=False, **options)
    return target


def with_one_element_changed(path: Path) -> Path:
    state = load_file(path)
    name = max(state, key=lambda one: state[one].numel())
    state[name].view(-1)[-1] = 40.0
    save_file(state, path.with_name("changed.safetensors"))
    return path.with_name("changed.safetensors")


@pytest.mark.parametrize("options", EXPORTS.values(), ids=EXPORTS)
def test_the_options_that_made_an_export_prove_it(options: dict[str, Any], run: Path) -> None:
    made = export(run, run.with_name("m.safetensors"), options)
    report = ckptool.compare(run, made, **options)
    assert report.verify.ok, report.verify.findings
    assert report.coverage is not None
    here, there = report.coverage
    assert there.compared == there.total
    assert (here.compared.tensors, here.total.tensors) == (10, 20)
    assert "not compared: 10 tensors (1,320 bytes) and 1 value of" in report.verify.summary
    assert not ckptool.compare(run, made).verify.ok
    changed = ckptool.compare(run, with_one_element_changed(made), **options)
    assert [f.code for f in changed.verify.findings if f.severity.value == "error"] == [
        "tensor-differs"
    ]


@pytest.mark.parametrize("options", EXPORTS.values(), ids=EXPORTS)
def test_a_manifest_of_the_rewritten_proves_the_export(options: dict[str, Any], run: Path) -> None:
    made = export(run, run.with_name("m.safetensors"), options)
    manifest = run.with_name("m.json")
    written = ckptool.verify(run, write_manifest=manifest, **options)
    assert "excluded: 10 tensors (1,320 bytes) and 1 value of" in written.summary
    assert ckptool.verify(made, manifest=manifest).ok
    assert ckptool.verify(run, manifest=manifest, **options).ok
    assert not ckptool.verify(run, manifest=manifest).ok
    assert not ckptool.verify(with_one_element_changed(made), manifest=manifest).ok


@pytest.mark.parametrize("name", ["model", "mapped"])
def test_a_manifest_of_all_proves_an_export_whose_options_can_be_undone(
    name: str, run: Path
) -> None:
    """The map goes back by itself, as the names are those of its ``to`` side."""
    made = export(run, run.with_name("m.safetensors"), EXPORTS[name])
    manifest = run.with_name("all.json")
    assert ckptool.verify(run, write_manifest=manifest).ok
    assert not ckptool.verify(made, manifest=manifest).ok
    report = ckptool.verify(made, manifest=manifest, **EXPORTS[name])
    assert report.ok, report.findings
    assert "excluded: 10 tensors (1,320 bytes) and 1 value of" in report.summary
    changed = with_one_element_changed(made)
    assert not ckptool.verify(changed, manifest=manifest, **EXPORTS[name]).ok


def test_numbers_of_quantized_tensors_are_proved(tmp_path: Path) -> None:
    source, manifest = quantized(tmp_path), tmp_path / "m.json"
    made = export(source, tmp_path / "m.safetensors", {"dequantize": True})
    assert ckptool.compare(source, made, dequantize=True).verify.ok
    assert not ckptool.compare(source, made).verify.ok
    ckptool.verify(source, write_manifest=manifest, dequantize=True)
    assert ckptool.verify(made, manifest=manifest).ok
    changed = with_one_element_changed(made)
    assert not ckptool.compare(source, changed, dequantize=True).verify.ok


@pytest.mark.parametrize("to", ["torch-save", "dcp", "dcp-safetensors", "safetensors"])
def test_whatever_format_it_was_exported_to(to: str, out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    target = out / ("m.pt" if to == "torch-save" else "m")
    options: dict[str, Any] = {"model_only": True, "dtype": "fp16"}
    ckptool.convert(source, target, to=to, **options)
    report = ckptool.compare(source, target, **options)
    assert report.verify.ok, report.verify.findings
    assert report.coverage is not None
    assert report.coverage[0].rest.tensors > 0


def test_the_whole_of_both_sides_counts_unless_an_option_leaves_it_out(run: Path) -> None:
    made = export(run, run.with_name("m.safetensors"), {"model_only": True})
    save_file(load_file(made) | {"more": torch.ones(2)}, run.with_name("more.safetensors"))
    report = ckptool.compare(run, run.with_name("more.safetensors"), model_only=True)
    assert {f.code for f in report.verify.findings} == {"excluded", "tensor-extra"}
    assert not report.verify.ok


@pytest.mark.parametrize("name", ["torch_2_1_dcp", "deepspeed_zero_2", "megatron_torch_dist"])
@pytest.mark.parametrize("target", ["m.pt", "m.safetensors"])
def test_values_in_one_piece_are_those_under_a_name_each(name: str, target: str, out: Path) -> None:
    source, to = case(name).path, "torch-save" if target == "m.pt" else "safetensors"
    ckptool.convert(source, out / target, to=to, fsync=False)
    dropped = ["args"] if "megatron" in name else []
    for one, other in ((source, out / target), (out / target, source)):
        report = ckptool.compare(one, other, drop=dropped)
        assert {f.code for f in report.verify.findings} <= {"excluded", "value-not-written"}
        assert report.verify.ok
        assert report.coverage is not None
        assert all(side.rest.values == 0 or dropped for side in report.coverage)


# Nothing compared, and casts


def test_what_has_nothing_in_common_is_never_the_same(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "b.safetensors")
    ignored = ["tensor-missing", "tensor-extra", "nothing-compared"]
    report = ckptool.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ignore=ignored)
    assert not report.verify.ok
    assert report.verify.summary.startswith("DIFFERENT: 1 difference; 2 errors ignored")


def test_values_alike_do_not_stand_for_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "step": 1}, tmp_path / "a.pt")
    torch.save({"b": torch.ones(2), "step": 1}, tmp_path / "b.pt")
    ignored = ["tensor-missing", "tensor-extra"]
    report = ckptool.compare(tmp_path / "a.pt", tmp_path / "b.pt", ignore=ignored)
    assert "nothing-compared" in {finding.code for finding in report.verify.findings}


def test_a_manifest_without_a_tensor_in_common_proves_nothing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "b.safetensors")
    ckptool.verify(tmp_path / "a.safetensors", write_manifest=tmp_path / "m.json")
    ignored = ["manifest-missing", "manifest-extra", "manifest-other-files", "manifest-differs"]
    report = ckptool.verify(
        tmp_path / "b.safetensors",
        manifest=tmp_path / "m.json",
        ignore=[*ignored, "no-checksum", "nothing-compared"],
    )
    assert not report.ok
    assert "1 problem; 2 errors ignored: manifest-missing (a)" in report.summary
    assert [finding.code for finding in report.findings] == ["nothing-compared"]


def test_no_manifest_lacks_a_tensor_that_could_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a": torch.arange(64.0), "b": torch.ones(2)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(64.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    report = ckptool.verify(path, write_manifest=tmp_path / "m.json", ignore="crc-mismatch")
    assert not report.ok
    assert not (tmp_path / "m.json").exists()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(4001.0), torch.tensor(4000.0, dtype=torch.bfloat16)),
        (torch.tensor([300]), torch.tensor([44], dtype=torch.uint8)),
        (torch.tensor([2.5]), torch.tensor([2])),
        (torch.tensor([1, 2]), torch.tensor([True, True])),
    ],
)
def test_a_cast_hides_nothing_that_convert_would_not_cast(
    one: torch.Tensor, other: torch.Tensor, tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2), "x": one}, tmp_path / "one.pt")
    torch.save({"w": torch.ones(2).bfloat16(), "x": other}, tmp_path / "other.pt")
    report = ckptool.compare(tmp_path / "one.pt", tmp_path / "other.pt", cast=True)
    assert [finding.code for finding in report.verify.findings] == ["dtype-differs"]


def test_how_many_were_cast_is_told(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"a": torch.ones(2).half(), "b": torch.ones(3)}, tmp_path / "b.safetensors")
    report = ckptool.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors", cast=True)
    assert report.verify.summary == (
        "EQUAL: 2 tensors (20 bytes) bit by bit, 1 of them cast to the coarser type of both"
    )


def test_a_tensor_that_is_not_read_and_that_the_other_lacks_is_a_difference(out: Path) -> None:
    source, unread = case("odd_kinds").path, case("odd_kinds").unread
    convert_to("safetensors", source, out / "m", drop=unread)
    report = ckptool.compare(source, out / "m")
    assert not report.verify.ok
    assert "tensor-not-compared" in {finding.code for finding in report.verify.findings}


# The command line


def test_the_command_line_takes_the_options_of_convert(run: Path) -> None:
    options = ["--model-only", "--map", "joined.toml", "--dtype", "bf16"]
    made = str(run.with_name("m.safetensors"))
    invoke = CliRunner().invoke
    assert invoke(app, ["convert", str(run), made, "--to", "safetensors", *options]).exit_code == 0
    told = invoke(app, ["verify", str(run), "--against", made, *options, "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["against"]["coverage"]["a"] == {
        "compared": {"tensors": 10, "bytes": 1320, "values": 0},
        "total": {"tensors": 20, "bytes": 2640, "values": 1},
    }
    assert invoke(app, ["verify", str(run), "--against", made]).exit_code == 1
    manifest = str(run.with_name("m.json"))
    assert invoke(app, ["verify", str(run), "--write-manifest", manifest, *options]).exit_code == 0
    assert invoke(app, ["verify", made, "--manifest", manifest]).exit_code == 0


@pytest.mark.parametrize("option", [("--map", "auto"), ("--dtype", "bf16"), ("--dequantize",)])
def test_options_that_rewrite_need_something_to_compare_with(
    option: tuple[str, ...], run: Path
) -> None:
    told = CliRunner().invoke(app, ["verify", str(run), *option])
    assert isinstance(told.exception, UsageError)
    assert option[0] in str(told.exception)
