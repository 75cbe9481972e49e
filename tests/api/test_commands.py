"""The commands as functions: the same options as keywords, and what they refuse."""

from __future__ import annotations

import gc
import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import case, inspect_one, read_back
from msgspec.structs import replace
from typer.testing import CliRunner

import ckptool
from ckptool.api import keywords
from ckptool.api.arguments import source_text
from ckptool.cli.app import app, load_command
from ckptool.commands import open as open_module
from ckptool.commands.bench import run as run_module
from ckptool.commands.inspect import report as inspecting
from ckptool.commands.options.bench import BenchOptions
from ckptool.errors import Changed, UsageError

SOURCE = case("dcp_fsdp2_tp").path


def printed(*words: object) -> dict[str, Any]:
    """What the command line prints as JSON."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    content: dict[str, Any] = json.loads(done.stdout)
    return content


FUNCTIONS: dict[str, list[Callable[..., Any]]] = {
    "inspect": [ckptool.inspect, ckptool.list_steps],
    "diff": [ckptool.diff],
    "extract": [ckptool.extract],
    "prune": [ckptool.prune],
    "convert": [ckptool.convert, ckptool.convert_run],
    "reshard": [ckptool.reshard],
    "merge": [ckptool.merge],
    "verify": [
        *(ckptool.verify, ckptool.compare, ckptool.verify_run, ckptool.verify_merge),
        ckptool.salvage,
    ],
    "bench": [ckptool.bench, ckptool.bench_changes],
    "formats": [ckptool.list_formats],
    "maps": [ckptool.list_maps, ckptool.map_text],
}


ALL = [one for functions in FUNCTIONS.values() for one in functions] + [
    *(ckptool.open, ckptool.load, ckptool.dcp.CheckpointReader.__init__)
]


FOR_PEOPLE = {
    *("json", "html", "quiet", "debug", "verbose", "color", "no_progress", "help_all"),
    *("inspect tensors", "inspect shards", "inspect rank_bytes", "inspect export"),
    *("inspect depth", "inspect sort", "inspect format", "inspect mesh"),
    *("verify format", "verify codes", "bench plot", "bench recommend"),
    *("verify follow", "verify then"),
}
"""Options of what is shown on the screen, and how; and what only a signal ends."""


QUESTIONS = {
    *("inspect stats", "verify against", "verify recipe", "verify latest_good", "verify salvage"),
    *("convert all_steps", "bench compare", "maps check"),
}
"""Options that ask another question: functions of their own."""


PYTHONS_OWN = {"from": "from_format", "all": "every"}


NO_OPTIONS = {
    *("progress", "path", "names", "other", "source", "sources"),
    *("target", "run", "report", "name"),
}


@pytest.mark.parametrize("command", FUNCTIONS)
def test_every_option_is_a_keyword_and_the_other_way_round(command: str) -> None:
    parameters = load_command(command).params
    long = [one.opts[0].removeprefix("--") for one in parameters if one.opts[0].startswith("--")]
    options = {PYTHONS_OWN.get(one, one).replace("-", "_") for one in long}
    for_python = {o for o in options if o not in FOR_PEOPLE and f"{command} {o}" not in FOR_PEOPLE}
    functions = FUNCTIONS[command]
    keywords = {name for one in functions for name in inspect.signature(one).parameters}
    asked = {option for option in for_python if f"{command} {option}" in QUESTIONS}
    assert for_python - asked == keywords - NO_OPTIONS - asked


def test_the_keywords_for_type_checkers_are_those_of_the_options() -> None:
    assert Path(keywords.__file__).read_text().splitlines() == list(source_text())


def test_inspect() -> None:
    report = inspect_one(SOURCE)
    assert report.totals.tensors == len(case("dcp_fsdp2_tp").truth)


def test_a_url_is_asked_for_metadata_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(inspecting, "inspect", lambda _, read: asked.append(read.values))
    ckptool.inspect(SOURCE)
    ckptool.inspect("memory://bucket/step")
    ckptool.inspect("memory://bucket/step", values=True)
    assert asked == [True, False, True]


def test_no_garbage_is_collected_while_a_catalog_is_made_and_some_while_data_is_read(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[bool] = []
    scan = open_module._scan

    def look(*given: Any) -> Any:
        scans.append(gc.isenabled())
        return scan(*given)

    monkeypatch.setattr(open_module, "_scan", look)
    moves: list[bool] = []
    progress: Any = lambda done, total: moves.append(gc.isenabled())  # noqa: E731
    ckptool.convert(SOURCE, out / "m", to="dcp", fsync=False, progress=progress)
    assert (set(scans), set(moves), gc.isenabled()) == ({False}, {True}, True)


def test_stats() -> None:
    (found,) = ckptool.stats(SOURCE, "model.embed.weight")
    truth = ckptool.open(SOURCE).read("model.embed.weight")
    assert (found.minimum, found.maximum) == (truth.min().item(), truth.max().item())


def test_what_stats_reports_is_what_json_prints_of_it() -> None:
    measured = ckptool.stats(SOURCE, "embed")
    told = printed("inspect", SOURCE, "--stats", "embed")
    assert told == ckptool.inspect(SOURCE).to_dict() | {"stats": measured.to_dict()["stats"]}
    assert measured
    assert [row["name"] for row in told["stats"]] == [each.entry.name for each in measured]


def test_a_report_is_false_where_something_cannot_be_read_or_is_not_finite(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "m.pt")
    assert not ckptool.stats(tmp_path / "m.pt")
    assert not replace(ckptool.inspect(SOURCE), problems=("w: 2 rows missing",))


def test_convert(out: Path) -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))

    options: Any = {"model_only": True, "dtype": torch.bfloat16, "fsync": False, "budget": "64MiB"}
    report = ckptool.convert(SOURCE, out / "m", to="safetensors", progress=progress, **options)
    assert report.target_format == "hf"
    (total,) = {total for _, total in told}
    assert told[-1] == (total, total)
    assert total >= report.write_bytes
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    found = read_back("safetensors", out / "m")
    assert found["embed.weight"][0] == "bfloat16"


@pytest.mark.parametrize("name", ["deepspeed_zero_3", "hf_shards", "rank_base"])
def test_progress_ends_with_all_that_was_announced(name: str, out: Path) -> None:
    """Including the bytes that are not tensors."""
    path = case(name).path
    calls: list[Callable[[Any], Any]] = [
        lambda tell: ckptool.convert(path, out / "d", to="dcp", fsync=False, progress=tell),
        lambda tell: ckptool.convert(path, out / "h", to="hf", dtype="bf16", progress=tell),
        lambda tell: ckptool.reshard(path, out / "r", mesh="2", fsync=False, progress=tell),
        lambda tell: ckptool.verify(path, progress=tell),
        lambda tell: ckptool.compare(path, path, progress=tell),
        lambda tell: ckptool.stats(path, progress=tell),
    ]
    for call in calls:
        told: list[tuple[int, int]] = []
        call(lambda done, total: told.append((done, total)))  # noqa: B023
        assert told[-1][0] == told[-1][1] > 0


def test_a_dry_run_writes_nothing(out: Path) -> None:
    report = ckptool.convert(str(SOURCE), str(out / "m"), to="dcp", dry_run=True)
    assert report.write_bytes > 0
    assert not list(out.iterdir())


def test_reshard_and_verify_and_compare(out: Path) -> None:
    report = ckptool.reshard(SOURCE, out / "m", mesh="4x2", policy="hsdp", fsync=False)
    assert report.mesh.shape == (4, 2)
    assert ckptool.verify(out / "m", strict=True).ok
    assert ckptool.compare(out / "m", SOURCE)
    assert not ckptool.compare(out / "m", case("dcp_base").path)


def test_commands_take_an_open_checkpoint(out: Path) -> None:
    """With the options that it was opened with."""
    one = ckptool.open(SOURCE, model_only=True, dtype="fp32")
    assert repr(ckptool.inspect(one)).startswith(f"<ckptool.InspectReport {SOURCE} dcp: ")
    assert inspect_one(one).totals.tensors == len(one.tensors)
    assert {item.entry.name for item in ckptool.stats(one)} == set(one.tensors)
    ckptool.convert(one, out / "m", to="dcp", fsync=False)
    written = ckptool.open(out / "m")
    assert written.tensors.keys() == one.tensors.keys()
    assert written.tensors["embed.weight"].dtype.name == "float32"
    assert ckptool.compare(one, out / "m")
    assert ckptool.verify(ckptool.open(SOURCE)).ok
    assert ckptool.reshard(ckptool.open(SOURCE), out / "r", mesh="2", dry_run=True).choices
    ckptool.reshard(one, out / "r", mesh="2", fsync=False)
    assert ckptool.compare(out / "m", out / "r")
    with pytest.raises(TypeError, match="unexpected keyword argument 'strip_prefix'"):
        ckptool.reshard(ckptool.open(SOURCE, strip_prefix="model"), out / "r", mesh="2")
    with pytest.raises(TypeError, match="per_rank is for opening"):
        ckptool.inspect(one, per_rank=True)


def test_a_command_refuses_an_open_checkpoint_that_was_changed(out: Path) -> None:
    shutil.copytree(SOURCE, out / "c")
    one = ckptool.open(out / "c")
    file = max((out / "c").glob("*.distcp"))
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(Changed):
        ckptool.convert(one, out / "m", to="dcp")


def test_a_reshard_is_checked_through_torch(out: Path) -> None:
    assert ckptool.reshard(SOURCE, out / "m", mesh="1", check=True, fsync=False).mesh.size == 1
    with pytest.raises(ckptool.CkptoolError, match="the mesh has 2 ranks, but 1 are running"):
        ckptool.reshard(SOURCE, out / "n", mesh="2", check=True)
    assert not (out / "n").exists()


def test_a_comparison_of_what_was_cast(out: Path) -> None:
    ckptool.convert(SOURCE, out / "m", to="dcp", dtype="bf16", model_only=True, fsync=False)
    model: Any = {"model_only": True}
    assert not ckptool.compare(SOURCE, out / "m", **model).verify.ok
    assert ckptool.compare(SOURCE, out / "m", cast=True, other_format="dcp", **model).verify.ok
    assert ckptool.compare(SOURCE, out / "m", dtype="bf16", **model).verify.ok
    assert ckptool.compare(SOURCE, out / "m", rtol=0.01, select=["model.*"]).verify.findings
    for limit in (float("inf"), float("nan"), 10**400):
        with pytest.raises(ckptool.CkptoolError, match="not a finite number"):
            ckptool.compare(SOURCE, out / "m", atol=limit)


def test_a_manifest_proves_other_formats(out: Path) -> None:
    ckptool.convert(SOURCE, out / "m.pt", to="torch-save", fsync=False)
    written = ckptool.verify(SOURCE, write_manifest=out / "m.json")
    assert written.ok
    assert ckptool.verify(out / "m.pt", manifest=str(out / "m.json")).ok
    assert not ckptool.verify(case("dcp_base").path, manifest=out / "m.json").ok
    with pytest.raises(ckptool.CkptoolError, match="exists"):
        ckptool.verify(SOURCE, write_manifest=out / "m.json")
    assert ckptool.verify(SOURCE, write_manifest=out / "m.json", overwrite=True).ok
    with pytest.raises(UsageError, match="one at a time"):
        ckptool.verify(SOURCE, manifest=out / "m.json", write_manifest=out / "n.json")


def test_what_a_benchmark_is_asked(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    asked: list[BenchOptions] = []
    report = SimpleNamespace(run=lambda progress: None)

    def prepare(options: BenchOptions) -> SimpleNamespace:
        asked.append(options)
        return report

    monkeypatch.setattr(run_module, "prepare_bench", prepare)
    ckptool.bench(size="2MiB", strategies="dcp-*", ranks=1, repeat=2, out=out, abort=True)
    ckptool.bench(like=SOURCE)
    assert asked == [
        BenchOptions(2 << 20, None, out, ("dcp-*",), 1, 2, abort=True),
        BenchOptions(like=SOURCE),
    ]


def test_formats_and_maps() -> None:
    known = {one.name: one for one in ckptool.list_formats()}
    assert known["dcp"].reads
    assert known["dcp"].reshards
    assert not known["deepspeed"].converts
    assert all(ckptool.map_text(name).startswith(("#", "name")) for name in ckptool.list_maps())


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ckptool.verify(SOURCE, mesh="2"), TypeError, "unexpected .* 'mesh'"),  # type: ignore[call-arg]
        (lambda: ckptool.open(SOURCE, modelonly=1), TypeError, "did you mean 'model_only'"),  # type: ignore[call-arg]
        (lambda: ckptool.open(SOURCE, unstack=True), TypeError, "did you mean 'split_stacked'"),  # type: ignore[call-arg]
        (lambda: ckptool.open(SOURCE, model_only="yes"), TypeError, "='yes'.: a str, .* bool"),  # type: ignore[arg-type]
        (lambda: ckptool.open(SOURCE, select=[1]), TypeError, "Keep only matching"),  # type: ignore[list-item]
        (lambda: ckptool.verify(SOURCE, workers="4"), TypeError, "a str, but it takes int"),  # type: ignore[arg-type]
        (lambda: ckptool.verify(SOURCE, workers=True), TypeError, "a bool, but it takes int"),
        (lambda: ckptool.verify(SOURCE, workers=0), UsageError, "workers 0: at least 1"),
        (lambda: ckptool.verify(SOURCE, workers=257), UsageError, "workers 257: at most 256"),
        (lambda: ckptool.verify(SOURCE, seed=3), UsageError, "it needs --sample"),
        (lambda: ckptool.open(SOURCE, map="auto", dim={"head": -1}), UsageError, "NAME=SIZE"),
        (
            lambda: ckptool.verify(SOURCE, sample=1.5),
            UsageError,
            "invalid sample '1.5': not a fraction",
        ),
        (lambda: ckptool.open(SOURCE, dtype="int8"), UsageError, "not a floating-point type"),
        (lambda: ckptool.open(SOURCE, dtype=torch.int8), UsageError, "not a floating-point type"),
        (lambda: ckptool.reshard(SOURCE, mesh="two"), UsageError, "invalid mesh"),
        (lambda: ckptool.reshard(SOURCE, mesh=(2, 4)), TypeError, "2x4, 8, or dp=2,tp=4"),  # type: ignore[arg-type]
        (lambda: ckptool.convert(SOURCE, "m", to="dcp", budget="much"), UsageError, "not a size"),
        (
            lambda: ckptool.convert(SOURCE, "m", to="dcp", budget="9" * 400),
            UsageError,
            "not a size",
        ),
        (lambda: ckptool.bench(like=SOURCE, size=1), UsageError, "cannot be combined"),
        (lambda: ckptool.bench(out="memory://x", abort=True), UsageError, "--out is a URL"),
        (lambda: ckptool.map_text("llama"), UsageError, "unknown map"),
        (lambda: ckptool.open(""), UsageError, "empty path"),
        (lambda: ckptool.convert(SOURCE, "", to="hf"), UsageError, "empty path"),
        (lambda: ckptool.convert(SOURCE, "m", hf_assets=""), UsageError, "hf_assets: empty path"),
        (lambda: ckptool.save({"a": torch.ones(1)}, ""), UsageError, "empty path"),
    ],
)
def test_what_makes_no_sense_is_reported(call: Callable[[], Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_one_glob_may_stand_by_itself() -> None:
    assert ckptool.open(SOURCE, select="model.embed.weight").tensors.keys() == {
        "model.embed.weight"
    }


@pytest.mark.parametrize("function", ALL)
def test_help_tells_every_keyword(function: Callable[..., Any]) -> None:
    told = inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters.values()
    assert not [one for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD]
    defaults = [one.name for one in parameters if str(one.default) == "default"]
    assert [name for name in defaults if not re.search(rf"^ +{name}: \w", told, re.M)] == []
