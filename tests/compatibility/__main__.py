"""Measure which framework versions' checkpoints are read bit-equal.

``make compatibility`` installs each version beside one torch, has the recipes of ``fixtures/`` save
small checkpoints with it, reads them with ckptool and compares every tensor, bit by bit, with what
the writer had in memory. For those of ``RESUMES`` the framework then resumes from its own folder
and from ckptool's version of it, on other numbers of ranks: losses must be equal to the last bit.
The table is written into ``ckptool/docs/formats.md``. It needs a package registry, and takes one to
five minutes per version. Arguments select what to measure, such as ``deepspeed`` or
``deepspeed==0.19.8``; other rows stay.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranks import FORGOTTEN
from writers import ONE_SIZE, RESUMES, WRITERS, Way, Writer, numbers

import ckptool
from ckptool.errors import CkptoolError

ROOT = Path(__file__).parents[2]
DOC = ROOT / "ckptool" / "docs" / "formats.md"
HOME = ROOT / ".venv-compatibility"
TORCH = "2.13.0"
BASE = (f"torch=={TORCH}", "numpy", "safetensors", "zstandard", "setuptools", "wheel")
HEAD = "| writer | versions | with torch | checkpoints | read bit-equal | resumes from ckptool's |"
PATIENCE = 600
"""Seconds that one version may take to save, or to resume once."""


def main(names: list[str]) -> int:
    """Measure, put the rows into the page, and return 1 where something was read as it is not."""
    asked = [name.partition("==")[::2] for name in names or WRITERS]
    unknown = {name for name, _ in asked} - WRITERS.keys()
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: not one of {', '.join(WRITERS)}")
    todo = [(name, v) for name, only in asked for v in ([only] if only else WRITERS[name].versions)]
    wrong = []
    for at, (name, version) in enumerate(todo, 1):
        print(f"{at} of {len(todo)}: {name} {version}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            row = measure(name, version, WRITERS[name], Path(folder))
        print(name, version, *row, sep=" | ", flush=True)
        put(known_rows() | {(name, version): row})
        wrong += [f"{name} {version}"] * any("differs" in cell for cell in row)
    print(f"{len(todo)} measured, {len(wrong)} differ{': ' * bool(wrong)}{', '.join(wrong)}")
    print(f"The table of all is in {DOC.relative_to(ROOT)}, and what could not be run says why.")
    return bool(wrong)


def measure(name: str, version: str, writer: Writer, folder: Path) -> list[str]:
    """Return the cells of one version: torch, recipes, whether read, whether resumed from."""
    other = writer.python.get(version)
    shown = TORCH + f", Python {other}" * bool(other)
    if other and not there(f"python{other}"):
        return [shown, "-", f"not run: there is no python{other}", "-"]
    home = HOME.with_name(f"{HOME.name}-{other}") if other else HOME
    python, site = home / "bin" / "python", home / "versions" / f"{name}-{version}"
    try:
        prepare(home, f"python{other}" if other else sys.executable)
        install(home, *writer.needs)
        if not site.exists():
            options = ["--no-deps", "--no-build-isolation", "--target", str(site)]
            beside = [writer.beside[version]] if version in writer.beside else []
            install(home, *options, f"{name}=={version}", *beside)
    except subprocess.CalledProcessError as error:
        return [shown, "-", f"not installed: {reason(error)}", "-"]
    read, problems, tensors = [], [], 0
    for recipe in writer.recipes_of(version):
        try:
            run(python, site, ["-m", "recipes", str(folder), recipe], ROOT / "fixtures")
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            problems.append(f"not written: {recipe}, {reason(error)}")
            continue
        try:
            same, wrong = compare(folder / recipe)
        except CkptoolError as error:
            same, wrong = 0, f"refused: {cell(error)}"
        tensors += same
        read += [] if wrong else [recipe]
        problems += [f"differs: {recipe}, {wrong}"] if wrong else []
    cells = [f"{tensors} tensors"] * bool(tensors) + problems
    resumed = resume(writer, python, site, folder) if read or not writer.recipes else "-"
    return [shown, ", ".join(read) or "-", "; ".join(cells) or "-", resumed]


def compare(case: Path) -> tuple[int, str]:
    """Return how many tensors are those of the truth, and the first that is not."""
    truth = json.loads((case / "truth.json").read_text())["tensors"]
    wanted = bytes_of(case / "truth.safetensors")
    checkpoint = ckptool.open(case / "ckpt")
    for name, facts in truth.items():
        entry = checkpoint.tensors.get(name)
        if entry is None:
            return 0, f"{name} is missing"
        tensor = checkpoint.read(name)
        kind = str(tensor.dtype).removeprefix("torch.")
        if (kind, list(tensor.shape)) != (facts["dtype"], facts["shape"]):
            return 0, f"{name} is {kind} {list(tensor.shape)}"
        if raw(tensor) != wanted[name]:
            return 0, name
    return len(truth), ""


def raw(tensor: Any) -> bytes:
    """Return the bytes of the values, in C order."""
    import torch

    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def bytes_of(path: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    return {name: values.tobytes() for name, values in load_file(path).items()}


def resume(writer: Writer, python: Path, site: Path, folder: Path) -> str:
    """Return from what a framework resumes as from its own folder, and from what not, and why."""
    if not writer.resume:
        return "-"
    resumption = Resumption(writer, python, site, folder)
    found: dict[str, list[str]] = {}
    for way in RESUMES[writer.resume]:
        try:
            verdict = resumption.follow(way)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            verdict = f"not run: {reason(error)}"
        except CkptoolError as error:
            verdict = f"differs: refused: {cell(error)}"
        found.setdefault(verdict, []).append(way.said)
    return "; ".join(f"{', '.join(ways)}: {verdict}" for verdict, ways in found.items())


@dataclass(frozen=True)
class Resumption:
    """Runs the program of a framework, once for each checkpoint of its own."""

    writer: Writer
    python: Path
    site: Path
    folder: Path
    known: dict[tuple[object, ...], str | Exception] = field(default_factory=dict)

    def follow(self, way: Way) -> str:
        """Return whether what is made of a checkpoint is resumed from as that itself is.

        CalledProcessError and TimeoutExpired where the program does not run, CkptoolError where
        ckptool refuses.
        """
        own = self.folder / "-".join(("own", *way.own)) / self.writer.step
        other_size = self.writer.resume in ONE_SIZE and way.ranks != 2
        self.once("write", own, 2, way.own)
        wanted = self.once("resume", own, 2 if other_size else way.ranks, way.own)
        name = re.sub(r"\W+", "-", way.said)
        target = self.folder / name / (way.file or self.writer.step or "made")
        target.parent.mkdir(exist_ok=True)
        way.make(own, target)
        found = self.program("resume", target, way.ranks, way.then or way.own)
        if other_size:
            wanted, found = of_first(wanted), of_first(found)
        forgotten = f", {FORGOTTEN}" * (FORGOTTEN in wanted)
        return f"equal {self.writer.equal}{forgotten}" if wanted == found else "differs"

    def once(self, *run: Any) -> str:
        """Return what the program prints, or raise as it did, without running it again."""
        if run not in self.known:
            try:
                self.known[run] = self.program(*run)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                self.known[run] = error
        found = self.known[run]
        if isinstance(found, Exception):
            raise found
        return found

    def program(self, mode: str, path: Path, ranks: int, told: tuple[str, ...]) -> str:
        """Run the program; return the line of losses that it prints."""
        script = str(Path(__file__).with_name(f"{self.writer.resume}_program.py"))
        arguments = [script, mode, str(path), str(ranks), *told]
        return losses(run(self.python, self.site, arguments, self.folder))


def of_first(line: str) -> str:
    """Return the losses of the first rank alone, of a line that has those of all."""
    return str(ast.literal_eval(line.removeprefix("LOSSES"))[0][0])


def losses(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("LOSSES"))


def there(python: str) -> bool:
    """Return whether a Python can be run, which a pyenv's stand-in for one cannot."""
    try:
        return not subprocess.run([python, "-c", ""], capture_output=True).returncode
    except FileNotFoundError:
        return False


def prepare(home: Path, python: str) -> None:
    """Make the environment that versions are put in front of, where it is not there."""
    if not (home / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", str(home)], check=True)
        install(home, *BASE)


def install(home: Path, *arguments: str) -> None:
    """Install what pip is told to, with the Python of ``home``."""
    command = [str(home / "bin" / "python"), "-m", "pip", "-qq", "--disable-pip-version-check"]
    subprocess.run(
        [*command, "install", *arguments],
        check=True, capture_output=True, text=True, env=os.environ | {"DS_BUILD_OPS": "0"},
    )  # fmt: skip


def run(python: Path, site: Path, arguments: list[str], folder: Path) -> str:
    """Run Python with one version in front; CalledProcessError where it fails."""
    shared = next((site.parents[1] / "lib").glob("*/site-packages"))
    paths = os.pathsep.join(map(str, (site, ROOT / "fixtures", shared)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=environment,
        check=True, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    return done.stdout


def reason(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    """Return the last line that says why, fit for a table."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"longer than {error.timeout:.0f} s"
    lines = [line for line in (error.stderr or "").splitlines() if re.match(r"[\w.]*Error", line)]
    return cell((lines or ["failed"])[-1])


def cell(text: object) -> str:
    """Return a text's first line as a cell of a table."""
    return str(text).splitlines()[0].replace("|", "/").replace(str(ROOT), "")[:90]


def known_rows() -> dict[tuple[str, str], list[str]]:
    """Return the rows that the page has, by package and version."""
    lines = DOC.read_text().splitlines()
    rows = lines[lines.index(HEAD) + 2 :] if HEAD in lines else []
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in rows if row.startswith("|")]
    return {(name, version): rest for name, version, *rest in cells}


def put(rows: dict[tuple[str, str], list[str]]) -> None:
    """Put the table in the place of the one that the page ends with."""
    text = DOC.read_text()
    head, found, _ = text.partition(HEAD)
    if not found:
        raise SystemExit(f"{DOC}: the head of the table is not there")
    order = {name: at for at, name in enumerate(WRITERS)}
    known = sorted(rows, key=lambda key: (order.get(key[0], 99), numbers(key[1])))
    lines = ["| " + " | ".join([*key, *rows[key]]) + " |" for key in known]
    DOC.write_text(head + "\n".join([HEAD, "|---" * 6 + "|", *lines]) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
