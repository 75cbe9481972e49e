"""The findings of verify as JUnit and GitHub annotations, and the table of codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import case, run_verify

from ckptool.commands.verify.answer import Suite
from ckptool.commands.verify.codes import ALWAYS, CODES, Severity
from ckptool.commands.verify.findings import Finding, VerifyReport
from ckptool.render.ci import annotation, print_junit, show_annotations


def junit(*words: str) -> ElementTree.Element:
    return ElementTree.fromstring(run_verify(*words, "--format", "junit").stdout)


def test_junit_has_the_checks_that_were_asked(flipped: Path, tmp_path: Path) -> None:
    (suite,) = junit(str(flipped), "--against", str(flipped))
    assert "comparison" in {one.get("name") for one in suite}
    good = case("dcp_base").path
    (suite,) = junit(str(good), "--write-manifest", str(tmp_path / "m.json"))
    assert {one.get("name") for one in suite} == {*ALWAYS, "manifest"}
    assert suite.get("failures") == "0"


def test_junit_has_a_suite_for_each_step(flipped: Path, tmp_path: Path) -> None:
    shutil.copytree(flipped, tmp_path / "run" / "step-20")
    shutil.copytree(case("dcp_base").path, tmp_path / "run" / "step-10")
    suites = junit(str(tmp_path / "run"), "--all")
    failures = {Path(str(one.get("name"))).name: one.get("failures") for one in suites}
    assert failures == {"step-20": "1", "step-10": "0"}


def test_junit_of_names_that_no_xml_can_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding("not-finite", Severity.WARNING, "a\x00\x1b[31m<&>\ud800", "f", "t")
    report = VerifyReport(tmp_path, "dcp", (finding,), True, "OK")
    print_junit([Suite(report)], strict=True)
    text = ElementTree.fromstring(capsys.readouterr().out).findtext(".//failure")
    assert text == "not-finite: a\\x00\\x1b[31m<&>\\ud800"


def test_annotations(flipped: Path) -> None:
    """Of themselves on GitHub, elsewhere where asked; beside data they are on stderr."""
    on_github = {"GITHUB_ACTIONS": "true"}
    expected = f"::error file={flipped}/__1_0.distcp,title=ckptool crc-mismatch::"
    for done in (
        run_verify(str(flipped), env=on_github),
        run_verify(str(flipped), "--format", "github"),
    ):
        (found,) = [line for line in done.stdout.splitlines() if line.startswith("::")]
        assert found.startswith(expected)
        assert "FAILED" in done.stdout
    json.loads(run_verify(str(flipped), "--json", env=on_github).stdout)
    for form in ("json", "junit"):
        assert expected in run_verify(str(flipped), "--format", form, env=on_github).stderr
    assert "::error" not in run_verify(str(flipped), "--format", "text").stdout


def test_there_are_ten_annotations_at_most_errors_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def findings(severity: Severity, count: int) -> tuple[Finding, ...]:
        return tuple(Finding("not-finite", severity, f"n{i}") for i in range(count))

    found = (*findings(Severity.WARNING, 8), *findings(Severity.ERROR, 7))
    found += findings(Severity.INFO, 5)
    show_annotations([VerifyReport(tmp_path, "dcp", found)], stderr=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["::error"] * 7 + ["::warning"] * 3
    assert lines[-1] == "and 5 more findings, not annotated"


def test_annotations_cannot_be_forged(tmp_path: Path) -> None:
    finding = Finding("not-finite", Severity.ERROR, "a\n::error::b 100%", "x,y:z\n", "t")
    line = annotation(VerifyReport(tmp_path, "dcp", (finding,)), finding)
    assert "\n" not in line
    assert line.endswith("x%2Cy%3Az\\n,title=ckptool not-finite::a\\n::error::b 100%25")


def test_the_codes_are_listed() -> None:
    lines = run_verify("--codes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(CODES)
    told = json.loads(run_verify("--codes", "--json").stdout)
    assert [row["code"] for row in told["codes"]] == list(CODES)
