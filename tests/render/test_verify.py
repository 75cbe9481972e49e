"""What verify found as JUnit and annotations of GitHub, and the table of codes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

from conftest import run_verify

from ckptool.commands.verify.codes import CODES, Severity
from ckptool.commands.verify.findings import Finding, VerifyReport
from ckptool.render.verify import _annotation, write_junit


def test_junit(flipped: Path, tmp_path: Path) -> None:
    target = tmp_path / "verify.xml"
    run_verify(str(flipped), "-q", "--junit", str(target))
    suite = ElementTree.parse(target).getroot()
    cases = {one.get("name"): one for one in suite}
    assert suite.get("failures") == "1"
    assert cases.keys() == CODES.keys()
    assert "CRC-32" in cases["crc-mismatch"].find("failure").text
    assert cases["chunk-gap"].find("failure") is None


def test_junit_of_names_that_no_xml_can_hold(tmp_path: Path) -> None:
    finding = Finding("not-finite", Severity.WARNING, "a\x00\x1b[31m<&>\ud800", "f", "t")
    report = VerifyReport(tmp_path, "dcp", (finding,), True, "OK")
    write_junit(report, tmp_path / "x.xml", strict=True)
    text = ElementTree.parse(tmp_path / "x.xml").getroot().find(".//failure").text
    assert text == "a\\x00\\x1b[31m<&>\\ud800"


def test_annotations(flipped: Path) -> None:
    lines = run_verify(str(flipped), env={"GITHUB_ACTIONS": "true"}).stdout.splitlines()
    (found,) = [line for line in lines if line.startswith("::")]
    assert found.startswith(f"::error file={flipped}/__1_0.distcp,title=ckptool crc-mismatch::")
    beside = run_verify(str(flipped), "--json", env={"GITHUB_ACTIONS": "true"})
    json.loads(beside.stdout)
    assert "::error file=" in beside.stderr


def test_annotations_cannot_be_forged(tmp_path: Path) -> None:
    finding = Finding("not-finite", Severity.ERROR, "a\n::error::b 100%", "x,y:z\n", "t")
    line = _annotation(SimpleNamespace(path=tmp_path), finding)
    assert "\n" not in line
    assert line.endswith("x%2Cy%3Az\\n,title=ckptool not-finite::a\\n::error::b 100%25")


def test_the_codes_are_listed() -> None:
    lines = run_verify("--codes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(CODES)
    told = json.loads(run_verify("--codes", "--json").stdout)
    assert [row["code"] for row in told["codes"]] == list(CODES)
