"""How a map matches a checkpoint's names: names without a rule, and rules without a match."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.keymap.check import MapCheck, check_map
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import UsageError

MAP = """
[[rule]]
from = "layers.{layer}.wq.weight [(head dim) hidden]"
to = "model.layers.{layer}.q_proj.weight [(head dim) hidden]"

[[rule]]
from = "norm.weight"
to = "model.norm.weight"

[[rule]]
from = "something.quite.different"
to = "model.elsewhere"
"""


def checked(folder: Path, *names: str) -> MapCheck:
    (folder / "m.toml").write_text(MAP)
    save_file({name: torch.zeros(4, 2) for name in names}, folder / "a.safetensors")
    return check_map(folder / "a.safetensors", MapOptions(str(folder / "m.toml")))


def test_names_that_no_rule_takes_and_rules_that_take_none(tmp_path: Path) -> None:
    report = checked(tmp_path, "layers.0.wk.weight", "layers.1.wk.weight", "norm.weight", "xyz")
    assert (report.matched, report.tensors, report.ok) == (1, 4, False)
    assert [(e.name, e.count, e.nearest) for e in report.names] == [
        ("layers.0.wk.weight", 2, "layers.{layer}.wq.weight"),
        ("xyz", 1, None),
    ]
    assert [(e.name, e.nearest) for e in report.rules] == [
        ("layers.{layer}.wq.weight", "layers.0.wk.weight"),
        ("something.quite.different", None),
    ]


def test_a_map_that_takes_all_names_but_cannot_be_applied(tmp_path: Path) -> None:
    report = checked(tmp_path, "layers.0.wq.weight", "norm.weight")
    assert (report.names, report.ok) == ((), False)
    assert "size of dim, head not found" in str(report.problem)
    line = ["maps", str(tmp_path / "m.toml"), "--check", str(tmp_path / "a.safetensors")]
    output = " ".join(CliRunner().invoke(app, line).output.split())
    assert "matches 2 of 2 tensors, but cannot be applied" in output


def test_a_size_that_decides_which_rule_takes_a_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(
        '[[rule]]\nfrom = "a.{mtp + layers}.w"\nto = "mtp.{mtp}.w"\n\n'
        '[[rule]]\nfrom = "a.{layer}.w"\nto = "b.{layer}.w"\n'
    )
    save_file({"a.0.w": torch.zeros(2), "c": torch.zeros(2)}, tmp_path / "a.safetensors")
    report = check_map(tmp_path / "a.safetensors", MapOptions(str(tmp_path / "m.toml")))
    assert [unmatched.name for unmatched in report.names] == ["c"]
    save_file({"a.0.w": torch.zeros(2)}, tmp_path / "a.safetensors")
    report = check_map(tmp_path / "a.safetensors", MapOptions(str(tmp_path / "m.toml")))
    assert (report.names, report.ok) == ((), False)
    assert "size of layers not found" in str(report.problem)


@pytest.mark.parametrize(
    ("wrapped", "rule"),
    [
        ("layers.0._orig_mod.wq.weight", r"(^|\.)((_orig_mod)\.)+=\1"),
        ("layers.0._checkpoint_wrapped_module.module.wq.weight", "_wrapped_module|module)"),
        ("pytorch_model_fsdp.a.b.c.layers.0.wq.weight", None),
    ],
)
def test_wrappers_that_stop_a_match_are_named(
    wrapped: str, rule: str | None, tmp_path: Path
) -> None:
    hint = checked(tmp_path, wrapped, "norm.weight").hint
    assert hint is None if rule is None else rule in str(hint)


def test_on_the_command_line(tmp_path: Path) -> None:
    checked(tmp_path, "layers.0.wk.weight", "norm.weight")
    line = ["maps", str(tmp_path / "m.toml"), "--check", str(tmp_path / "a.safetensors")]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 1
    assert "layers.0.wk.weight" in done.stdout
    assert "matches 1 of 2 tensors" in done.stdout
    said = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    assert (said["schema"], said["matched"]) == ("ckptool.map_check/2", 1)
    assert isinstance(CliRunner().invoke(app, ["maps", "--check", "x"]).exception, UsageError)
