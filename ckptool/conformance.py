"""Check a format against a fixture: ``python -m ckptool.conformance MODULE FIXTURE``.

``MODULE`` is ``package.module``, or ``package.module:ATTRIBUTE`` where its ``Format`` is not called
``FORMAT``. ``FIXTURE`` is a folder of ``ckpt``, a checkpoint as its writer left it; ``truth.json``,
with its ``format`` and the ``dtype`` and ``shape`` of each of its ``tensors``; and
``truth.safetensors``, each tensor's bytes in C order.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.errors import CkptoolError
from ckptool.formats import FORMATS
from ckptool.formats.base import Format

Digests = dict[str, tuple[str, tuple[int, ...], str]]
"""Element type, shape, and SHA-256 of the bytes in C order, by name."""
_FLIPS, _FEWEST_FLIPS, _MOST_FLIPS = 128, 4, 16
"""Bytes to flip, one at a time: in all files together, and at least and at most in each."""


def conformance_problems(row: Format, fixture: Path, scratch: Path) -> Iterator[str]:
    """Yield the problems in words. ``scratch`` is an empty folder to write into."""
    FORMATS.add(row)
    source, expected = _checkpoint(row, fixture), _truth(fixture)
    opened = open_checkpoint(source)
    if opened.format.name != row.name:
        yield f"detected as {opened.format.name}, not as {row.name}"
        return
    yield from map(str, filter(None, map(coverage_problem, opened.catalog.tensors.values())))
    yield from _differences("read", expected, _digests(source, scratch / "read.json"))
    conversions: dict[str, Callable[[Path], object]] = {
        "dcp": lambda target: ckptool.convert(source, target, to="dcp")
    }
    if row.writing.convert is not None:
        conversions["convert"] = lambda target: ckptool.convert(source, target, to=row.name)
    if row.writing.reshard is not None:
        conversions["reshard"] = lambda target: ckptool.reshard(
            source, target, mesh="2", to=row.name
        )
    suffix = next(iter(row.detection.suffixes), "")
    for name, write in conversions.items():
        target = scratch / f"{name}{'' if name == 'dcp' else suffix}"
        write(target)
        yield from _differences(name, expected, _digests(target, scratch / f"{name}.json"))
    place = Path(str(opened.path))
    root = place if place.is_dir() else place.parent
    flips = min(_MOST_FLIPS, max(_FEWEST_FLIPS, _FLIPS // len(opened.catalog.files)))
    for file in opened.catalog.files:
        yield from _damage_problems(source, root / file, scratch, flips)


def _checkpoint(row: Format, fixture: Path) -> Path:
    """Return the folder, or its only file if that is a checkpoint of the format by itself."""
    folder = fixture / "ckpt"
    files = list(folder.iterdir())
    return files[0] if len(files) == 1 and files[0].suffix in row.detection.suffixes else folder


def _truth(fixture: Path) -> Digests:
    """Read what a fixture must hold."""
    tensors = json.loads((fixture / "truth.json").read_text())["tensors"]
    data = (fixture / "truth.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    digests: Digests = {}
    for name, facts in tensors.items():
        start, stop = header[name]["data_offsets"]
        digest = hashlib.sha256(data[begin + start : begin + stop]).hexdigest()
        digests[name] = (facts["dtype"], tuple(facts["shape"]), digest)
    return digests


def _digests(path: Path, manifest: Path) -> Digests:
    """Read a whole checkpoint through the manifest that verify writes for it."""
    report = ckptool.verify(path, write_manifest=manifest)
    if not manifest.exists():
        raise CkptoolError(f"{path}: verify finds {', '.join(map(str, report.findings))}")
    tensors = json.loads(manifest.read_text())["tensors"]
    return {n: (t["dtype"], tuple(t["shape"]), t["sha256"]) for n, t in tensors.items()}


def _differences(step: str, expected: Digests, actual: Digests) -> Iterator[str]:
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            yield f"{step}: {name}: {actual.get(name)}, expected {expected.get(name)}"


def _damage_problems(source: Path, file: Path, scratch: Path, flips: int) -> Iterator[str]:
    """Yield a line if a truncated file goes unnoticed, or a changed byte causes a traceback."""
    folder = source if source.is_dir() else source.parent
    shutil.copytree(folder, scratch / "damaged")
    copy, damaged = scratch / "damaged" / source.relative_to(folder), scratch / "damaged"
    damaged /= file.relative_to(folder)
    good = file.read_bytes()
    damaged.write_bytes(good[: len(good) // 2])
    if good and _is_sound(copy):
        yield f"{file}: verify reports no error although half of the file is missing"
    for position in range(0, len(good), max(1, len(good) // flips)):
        changed = bytearray(good)
        changed[position] ^= 0x15
        damaged.write_bytes(changed)
        try:
            _is_sound(copy)
        except Exception as error:  # noqa: BLE001 (a format may raise only CkptoolError)
            yield f"{file}: byte {position:,} changed: {type(error).__name__}: {error}"
    shutil.rmtree(scratch / "damaged")


def _is_sound(path: Path) -> bool:
    try:
        return ckptool.verify(path).ok
    except CkptoolError:
        return False


def main(arguments: list[str]) -> str | None:
    """Return the problems as lines, or None. Raises UsageError and the errors of reading."""
    if len(arguments) != 2:
        return "usage: python -m ckptool.conformance MODULE[:ATTRIBUTE] FIXTURE"
    module, _, attribute = arguments[0].partition(":")
    sys.path.insert(0, "")
    row = getattr(import_module(module), attribute or "FORMAT")
    with TemporaryDirectory() as scratch:
        problems = list(conformance_problems(row, Path(arguments[1]), Path(scratch)))
    return "\n".join(problems) or None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
