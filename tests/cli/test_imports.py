"""What a command imports, and what it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DCP = Path(__file__).parents[2] / "fixtures" / "dcp_base" / "ckpt"
HF = Path(__file__).parents[2] / "fixtures" / "hf_full" / "ckpt"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_list_of_commands_imports_none(option: str) -> None:
    code = (
        "import sys, runpy; sys.argv = ['ckptool', sys.argv[1]]\n"
        "try: runpy.run_module('ckptool.cli.app').get('app')()\n"
        "except SystemExit: sys.exit(str([m for m in sys.modules if 'ckptool.commands' in m]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, option], capture_output=True, text=True, check=False
    )
    assert done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("checkpoint", [DCP, HF], ids=["dcp", "hf"])
def test_inspecting_imports_nothing_that_only_others_need(checkpoint: Path) -> None:
    names = (
        *("numpy", "torch", "rich.table", "html", "logging", "concurrent.futures", "xml"),
        *(
            "ckptool.engine",
            "ckptool.commands.verify.verification",
            "ckptool.formats.megatron.optimizer",
        ),
        *(("ckptool.formats.deepspeed",) if checkpoint == DCP else ("hashlib",)),
    )
    code = (
        "import sys; from ckptool.cli import _run; sys.argv = ['ckptool', 'inspect', sys.argv[1]]\n"
        f"code = _run(); sys.exit(str([code, *(m for m in {names} if m in sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "[0]"


@pytest.mark.parametrize("words", [("verify", "--quick"), ("diff",)], ids=lambda words: words[0])
@pytest.mark.parametrize("checkpoint", [DCP, HF], ids=["dcp", "hf"])
def test_numpy_is_imported_only_to_look_at_elements(
    words: tuple[str, ...], checkpoint: Path
) -> None:
    """Importing it takes a fifth of the time of these commands."""
    code = (
        "import sys; from ckptool.cli import _run; sys.argv = ['ckptool', *sys.argv[1:]]\n"
        "code = _run(); sys.exit(str([code, 'numpy' in sys.modules]))"
    )
    paths = [str(checkpoint)] * (2 if words == ("diff",) else 1)
    done = subprocess.run(
        [sys.executable, "-c", code, *words, *paths], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "[0, False]"


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "SRC", "--quiet"),
        ("verify", "SRC", "--json"),
        ("verify", "SRC"),
        ("inspect", "SRC", "--json"),
        ("diff", "SRC", "SRC", "--quiet"),
        ("extract", "SRC", "w", "OUT.safetensors", "--quiet"),
        ("convert", "SRC", "OUT", "--to", "dcp", "--json"),
        ("convert", "SRC", "OUT.safetensors"),
        ("convert", "SRC", "OUT", "--to", "dcp", "--part", "1/2"),
        ("reshard", "SRC", "OUT", "--mesh", "2x2"),
    ],
    ids=lambda words: f"{words[0]}{words[-1]}",
)
def test_what_shows_nothing_or_json_or_a_few_lines_imports_no_screen(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """Importing rich takes a seventh of the time of a small one; a terminal alone needs it."""
    code = (
        "import sys; from ckptool.cli import _run\n"
        "sys.argv = ['ckptool', *sys.argv[1:]]\n"
        "code = _run(); sys.stderr.write('\\n' + str([code, 'rich' in sys.modules]))"
    )
    places = {"SRC": str(DCP), "OUT": str(tmp_path / "out")}
    places["OUT.safetensors"] = f"{places['OUT']}.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", code, *(places.get(word, word) for word in words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == "[0, False]"


UNUSED = (
    *("rich", "tomllib", "ckptool.storage.planned_ranges", "ckptool.formats.deepspeed"),
    *("ckptool.formats.rank_files", "ckptool.formats.megatron.optimizer"),
    *("ckptool.commands.keymap", "ckptool.commands.inspect.report", "ckptool.commands.runs"),
    *("ckptool.commands.model.assets", "ckptool.commands.model.records", "ckptool.commands.merge"),
)
"""What no transfer needs whose source is DCP, and whose target no model's folder."""


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (("convert", "m.safetensors"), ("ckptool.render.reshard",)),
        (("reshard", "m", "--mesh", "2"), ("ckptool.formats.safetensors",)),
    ],
    ids=["convert", "reshard"],
)
def test_a_quiet_transfer_imports_no_screen_no_store_and_no_other_subject(
    words: tuple[str, ...], others: tuple[str, ...], tmp_path: Path
) -> None:
    names = (*UNUSED, *others)
    code = (
        "import sys; from ckptool.cli import _run\n"
        "sys.argv = ['ckptool', sys.argv[1], '--quiet', '--no-verify', *sys.argv[2:]]\n"
        f"code = _run(); sys.exit(str([code, *(m for m in {names} if m in sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, words[0], str(DCP), str(tmp_path / words[1]), *words[2:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == "[0]"
