"""The docs' worked example, installed as a plug-in: read, written, checked, or disabled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import case, read_back

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "ckptool" / "docs" / "adding-a-format.md"
SOURCE = case("dcp_fsdp2").path


def install(folder: Path, *, name: str = "raw-json", value: str = "raw_json:FORMAT") -> Path:
    """Install the example of the docs as pip would: a module, and its metadata beside it."""
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    (folder / "raw_json.py").write_text(code[1])
    info = folder / "raw_json-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raw-json\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ckptool.formats]\n{name} = {value}\n")
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def ckptool(site: Path, *arguments: object, plugins: str = "1") -> subprocess.CompletedProcess[str]:
    return run(site, "ckptool", *arguments, plugins=plugins)


def run(
    site: Path, module: str, *arguments: object, plugins: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), str(site)))
    env = {**os.environ, "PYTHONPATH": path, "CKPTOOL_PLUGINS": plugins}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_example_of_the_docs_does_all(site: Path, out: Path) -> None:
    install(site)
    raw, cut, back = out / "raw", out / "cut", out / "back"
    for arguments in (
        ("convert", SOURCE, raw, "--to", "raw-json"),
        ("reshard", raw, cut, "--mesh", "4"),
        ("convert", cut, back, "--to", "dcp"),
        ("verify", cut),
        ("verify", cut, "--against", SOURCE, "--drop", "step"),
    ):
        done = ckptool(site, *arguments)
        assert done.returncode == 0, (arguments, done.stderr, done.stdout)
    assert read_back("dcp", back) == case("dcp_fsdp2").truth
    shown = json.loads(ckptool(site, "inspect", cut, "--json").stdout)
    assert shown["format"] == "raw-json"


def test_the_example_reports_all_damage_at_once(site: Path, out: Path) -> None:
    install(site)
    raw = out / "raw"
    ckptool(site, "convert", SOURCE, raw, "--to", "raw-json")
    assert [path for path in raw.iterdir() if not path.stat().st_size]  # of an empty tensor
    (raw / "99.raw").write_bytes(b"left")
    file = raw / "0.raw"
    file.write_bytes(file.read_bytes()[:-1])
    (raw / "1.raw").write_bytes(b"")
    (raw / "2.raw").unlink()
    done = ckptool(site, "verify", raw, "--json")
    assert done.returncode == 1
    found = {(each["code"], each["file"]) for each in json.loads(done.stdout)["findings"]}
    codes = {code for code, _ in found}
    assert codes == {"file-truncated", "file-missing", "chunk-gap", "file-unused", "no-checksum"}
    assert found >= {("file-missing", "2.raw"), ("file-unused", "99.raw")}
    text = ckptool(site, "verify", raw).stdout
    assert "0.raw: 19 bytes, expected 20" in text
    assert "1.raw: 0 bytes, expected 20" in text


def test_a_plugin_is_off_unless_it_is_allowed(site: Path) -> None:
    install(site)
    (site / "raw_json.py").write_text("print('was run')")
    off = ckptool(site, "formats", plugins="0")
    assert off.returncode == 0
    assert "raw-json" not in off.stdout
    assert "was run" in ckptool(site, "--plugins", "formats", plugins="0").stdout


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("dcp", "raw_json:FORMAT", "ckptool has a format 'dcp' itself"),
        ("other", "raw_json:FORMAT", "not a Format of the name 'other'"),
        ("raw-json", "raw_json:NONE", "NONE"),
    ],
)
def test_a_plugin_that_is_none_is_named(site: Path, name: str, value: str, words: str) -> None:
    done = ckptool(install(site, name=name, value=value), "formats")
    assert done.returncode == 2
    assert words in done.stderr


def conformance(site: Path, fixture: Path) -> subprocess.CompletedProcess[str]:
    return run(site, "ckptool.conformance", "raw_json", fixture, plugins="0")


def test_the_conformance_suite_runs_outside(site: Path, out: Path) -> None:
    install(site)
    ckptool(site, "convert", SOURCE, out / "ckpt", "--to", "raw-json")
    for name in ("truth.json", "truth.safetensors"):
        (out / name).write_bytes((SOURCE.parent / name).read_bytes())
    done = conformance(site, out)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_conformance_suite_names_what_is_wrong(site: Path, out: Path) -> None:
    install(site)
    ckptool(site, "convert", SOURCE, out / "ckpt", "--to", "raw-json")
    facts = json.loads((SOURCE.parent / "truth.json").read_text())
    name = next(iter(facts["tensors"]))
    facts["tensors"][name]["shape"] = [1]
    (out / "truth.json").write_text(json.dumps(facts))
    (out / "truth.safetensors").write_bytes((SOURCE.parent / "truth.safetensors").read_bytes())
    done = conformance(site, out)
    assert done.returncode == 1
    assert all(f"{step}: {name}: " in done.stderr for step in ("read", "dcp", "convert", "reshard"))
