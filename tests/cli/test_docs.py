"""The statements of the README and the docs about the command line are true.

``PYTHONPATH=tests:tests/maps python tests/cli/test_docs.py`` writes the tables of options,
``ckptool/docs/options.md``.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from torchtitan_states import recorded, write_config
from typer.models import OptionInfo
from typer.testing import CliRunner

from ckptool.cli.app import MODULES, SUMMARIES, app, load_command
from ckptool.cli.examples import EXAMPLES
from ckptool.commands.options.declaration import RARE
from ckptool.commands.verify.codes import CODES, Severity
from ckptool.formats import FORMATS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "ckptool" / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
COMMAND = re.compile(
    r"(?:^\$ |- run: |\$\(|-m |`)ckptool ([a-z]+(?: .*?)?)(?= [|>]|\)|`| &&|$)", re.M
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
MODULE = re.compile(r"`([a-z_]+/[a-z_/]+\.py)`")
OTHER_PROGRAMS = {
    "--array",
    "--dependency",
    "--parsable",
    "--requeue",
    "--wrap",
    "--nproc-per-node",
    "--format",
}


def commands() -> dict[str, list[str]]:
    texts = [page.read_text() for page in PAGES]
    texts += [f"$ {example}" for examples in EXAMPLES.values() for example in examples]
    lines = [line for text in texts for line in COMMAND.findall(text)]
    return {line: shlex.split(line, comments=True) for line in lines}


@pytest.mark.parametrize("words", commands().values(), ids=commands())
def test_a_command_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = words[0]
    module = import_module(f"ckptool.cli.{MODULES.get(command, command)}")
    calls: list[dict[str, Any]] = []
    record = wraps(getattr(module, command))(lambda **values: calls.append(values))
    monkeypatch.setattr(module, command, record)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert len(calls) == 1


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the inputs of the README's commands."""
    model = {n: torch.from_numpy(a).float() for n, a in recorded("llama3")["trainer"].items()}
    for run in ("runs", "runs/checkpoint"):
        state = {"model": model, "train_state": {"step": 1000}}
        dcp.save(state, checkpoint_id=tmp_path / run / "step-1000", no_dist=True)
    torch.save({f"module.{name}": tensor for name, tensor in model.items()}, tmp_path / "model.pt")
    write_config("llama3", tmp_path / "assets")
    hf = tmp_path / "hf"
    save_file(recorded("llama3")["hf"], write_config("llama3", hf) / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_readme_run(workplace: Path) -> None:
    lines = COMMAND.findall(PAGES[0].read_text())
    runs = [
        line for line in lines if " " in line and not re.search(r"\b(SRC|CKPT|RUN|bench)\b", line)
    ]
    assert len(runs) > 10
    for line in runs:
        done = CliRunner().invoke(app, shlex.split(line, comments=True))
        assert done.exit_code == 0, (line, done.output, done.exception)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_exists(page: Path) -> None:
    flags = {flag for name in SUMMARIES for flag in flags_of(load_command(name))}
    named = set(OPTION.findall(page.read_text()))
    assert (
        named
        <= flags
        | {"--help", "--help-all", "--version", "--plugins", "--install-completion"}
        | OTHER_PROGRAMS
    )


def test_every_option_of_a_hint_exists() -> None:
    """Commands in backticks, in what the package says of an error."""
    texts = [m.read_text() for m in (ROOT / "ckptool").rglob("*.py")]
    nodes = [node for text in texts if "`ckptool " in text for node in ast.walk(ast.parse(text))]
    words = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    hints = [hint for text in words for hint in re.findall(r"`ckptool ([a-z]+) ([^`]*)`", text)]
    assert len(hints) > 3
    for name, rest in hints:
        assert set(OPTION.findall(rest)) <= {*flags_of(load_command(name))}, (name, rest)


@pytest.mark.parametrize("command", SUMMARIES)
def test_every_option_is_declared_as_a_field(command: str) -> None:
    """A command's own parameters are arguments, and classes of options."""
    module = import_module(f"ckptool.cli.{MODULES.get(command, command)}")
    hints = get_type_hints(getattr(module, command), include_extras=True)
    told = [told for hint in hints.values() for told in getattr(hint, "__metadata__", ())]
    assert not [each for each in told if isinstance(each, OptionInfo)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_and_page_exists(page: Path) -> None:
    text = page.read_text()
    modules = [ROOT / "ckptool" / path.removeprefix("ckptool/") for path in MODULE.findall(text)]
    links = [page.parent / link for link in re.findall(r"\]\(([^):#]+)\)", text)]
    assert [path for path in modules + links if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_heading_that_is_linked_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text())
    for link, anchor in links:
        text = (page.parent / link if link else page).read_text()
        headings = [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]
        assert anchor in {re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in headings}


def test_the_codes_are_those_of_verify() -> None:
    """The lists by severity have all, and no other word of the page looks like a code."""
    text = (DOCS / "verify.md").read_text()
    for severity in Severity:
        (words,) = re.findall(rf"^- {severity.value}: ((?:.|\n  )*)", text, re.M)
        expected = [name for name, code in CODES.items() if code.severity is severity]
        assert re.findall(r"`([a-z0-9-]+)`", words) == expected
    named = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", text))
    assert named <= CODES.keys() | FORMATS.keys()


def flags_of(command: Any) -> list[str]:
    return [flag for each in command.params for flag in (*each.opts, *each.secondary_opts)]


def option_tables() -> Iterator[str]:
    yield from ("# Options", "", "The options of every command; each also takes `--help`.")
    yield from ("`--help-all` also shows the rarely needed ones.",)
    for name, summary in SUMMARIES.items():
        yield from ("", f"## {name}", "", summary)
        options = [each for each in load_command(name).params if each.opts[0].startswith("-")]
        rare = [each for each in options if each.rich_help_panel == RARE]
        often = [each for each in options if each not in rare]
        for head, rows in (("option", often), ("rarely needed", rare)):
            if rows:
                yield from ("", f"| {head} | meaning |", "|---|---|", *map(row, rows))


def row(option: Any) -> str:
    flags = "`, `".join((*option.opts, *option.secondary_opts))
    metavar = f" {option.metavar}" if option.metavar else ""
    default = f" [default: {option.default}]" if option.default not in (None, False, True) else ""
    return f"| `{flags}{metavar.replace('|', chr(92) + '|')}` | {option.help}{default} |"


def test_the_tables_of_options_are_those_of_the_commands() -> None:
    assert (DOCS / "options.md").read_text().splitlines() == list(option_tables())


if __name__ == "__main__":
    (DOCS / "options.md").write_text("\n".join(option_tables()) + "\n")
