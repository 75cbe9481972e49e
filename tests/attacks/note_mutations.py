"""Change a note as an attacker would: its JSON, its bytes, or the file that it is."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUMBERS: list[object] = [-1, 0, 1, 7, 2**31, 2**53 + 1, 2**63, 2**70, 10**9, 1e9, 1.5]
NUMBERS += [True, None, "1", [], {}]
NAMES = [
    "..",
    "../x",
    "../../victim/thesis.txt",
    "../victim/thesis.txt",
    "a/../../victim/thesis.txt",
    "./train.py",
    "",
    ".",
    "a//b",
    "/",
    "x\0y",
    "..\\x",
    "\udcff",
    "\ud800",
    "n" * 300,
    "d/" * 3000 + "f",
    "link/thesis.txt",
    "train.py",
    "src/model.py",
    ".metadata",
]
RAW = ["NaN", "Infinity", "1e400", "-0", "[" * 5000, '{"a":' * 3000, "9" * 5000, '"\\ud800"']


def paths_in(value: Any, head: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield head
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_in(each, (*head, key))


def mutate_json(line: bytes, rng: random.Random, names: list[str]) -> bytes:
    """One JSON value with a few changes."""
    value = json.loads(line)
    raw: dict[str, str] = {}
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = [place for place in paths_in(value) if place]
        if not places:
            break
        *head, key = rng.choice(places)
        around = value
        for step in head:
            around = around[step]
        change = rng.choice(["number", "name", "rename", "rename", "drop", "add", "raw", "copy"])
        if change == "number":
            around[key] = rng.choice(NUMBERS)
        elif change == "name":
            around[key] = rng.choice(names)
        elif change == "rename" and isinstance(around, dict):
            around[rng.choice(names)] = around.pop(key)
        elif change == "drop":
            del around[key]
        elif change == "add" and isinstance(around, dict):
            around[rng.choice([*names, "more", "schema", "parts", "files"])] = around[key]
        elif change == "copy":
            around[key] = json.loads(json.dumps(value))
        else:
            raw["@raw@"] = rng.choice(RAW)
            around[key] = "@raw@"
    text = json.dumps(value)
    for mark, instead in raw.items():
        text = text.replace(f'"{mark}"', instead)
    if rng.random() < 0.1 and text.startswith("{"):
        text = text[:1] + text[1:-1] + ", " + text[1:-1] + "}" if text != "{}" else text
    return text.encode()


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes that were flipped, cut off, taken out, repeated or put in."""
    at = rng.randrange(len(data) + 1)
    other = rng.randrange(len(data) + 1)
    change = rng.choice(["flip", "cut", "take", "repeat", "put", "encode"])
    if change == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if change == "cut":
        return data[:at]
    if change == "take":
        return data[: min(at, other)] + data[max(at, other) :]
    if change == "repeat":
        return data[: max(at, other)] + data[min(at, other) :]
    if change == "encode":
        return rng.choice([b"\xef\xbb\xbf" + data, data.decode().encode("utf-16"), data * 2])
    return data[:at] + rng.choice([b"\0", b"\n", b"{}", b"\xff", b'"', b", "]) + data[at:]


def mutate(data: bytes, rng: random.Random, names: list[str] = NAMES) -> bytes:
    """A note or journal, with one line, or some bytes, changed; or with lines in another order."""
    lines = data.splitlines(keepends=True)
    change = rng.random()
    if change < 0.3 or not data.startswith(b"{"):
        return mutate_bytes(data, rng)
    if change < 0.35:
        rng.shuffle(lines)
        return b"".join(lines)
    at = 0 if rng.random() < 0.4 else rng.randrange(len(lines))
    end = b"\n" if lines[at].endswith(b"\n") else b""
    lines[at] = mutate_json(lines[at], rng, names) + end
    return b"".join(lines)


def as_link(path: Path, outside: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    (outside / "note").write_bytes(data)
    path.symlink_to(outside / "note")


def as_hard_link(path: Path, outside: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    (outside / "note").write_bytes(data)
    os.link(outside / "note", path)


def as_pipe(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "thesis.txt").write_text("precious")


def as_writable(path: Path, outside: Path) -> None:
    path.chmod(0o666)


def as_group_writable(path: Path, outside: Path) -> None:
    path.chmod(0o664)


def as_sparse(path: Path, outside: Path) -> None:
    os.truncate(path, 1 << 40)


def as_anothers(path: Path, outside: Path) -> None:
    os.chown(path, 65534, 65534)


KINDS: list[Callable[[Path, Path], None]] = [
    as_link,
    as_hard_link,
    as_pipe,
    as_folder,
    as_writable,
    as_group_writable,
    as_sparse,
    *([as_anothers] if os.geteuid() == 0 else []),
]
"""What else a note can be than this user's own file."""
