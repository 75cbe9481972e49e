"""Hostile safetensors headers and index files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attack_build as b
import pytest
from attack_harness import attack
from honest_files import le, require_honest


def nested(depth: int) -> bytes:
    return b'{"w":' + b"[" * depth + b"]" * depth + b"}"


def rewritten(**changes: Any) -> bytes:
    return b.safetensors({"w": b.entry() | changes})


SAFETENSORS: dict[str, Callable[[], bytes]] = {
    "header length 2**63": lambda: le(2**63, 8) + b"{}",
    "header length 2**64-1": lambda: le(2**64 - 1, 8) + b"{}",
    "header length past the end": lambda: le(100, 8) + b"{}",
    "header length 0": lambda: le(0, 8) + b"{}",
    "header shorter than its JSON": lambda: le(10, 8) + b.safetensors({"w": b.entry()})[8:],
    "seven bytes": lambda: b"\1" * 7,
    "nested 1,000,000 deep": lambda: b.safetensors(nested(1_000_000)),
    "unknown field nested as deep as is read": lambda: rewritten(more=json.loads(nested(124))),
    "unknown field nested deeper": lambda: rewritten(more=json.loads(nested(125))),
    "objects nested deep": lambda: b.safetensors(b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
    "name twice": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"w":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}'
    ),
    "dtype twice": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","dtype":"I32","shape":[2,3],"data_offsets":[0,24]}}'
    ),
    "shape overflows": lambda: rewritten(shape=[2**62, 2**62]),
    "shape of 4,000 digits": lambda: rewritten(shape=[10**4000, 10**4000]),
    "shape of 5,000 digits": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,24]}}'
    ),
    "200,000 huge dims": lambda: rewritten(shape=[2**62] * 200_000),
    "200,000 dims of one": lambda: rewritten(shape=[1] * 200_000 + [6]),
    "a hundred dims of one": lambda: rewritten(shape=[1] * 100 + [6]),
    "empty, beyond 64 bits": lambda: b.safetensors(
        {"w": b.entry(shape=[0, 2**70], offsets=[0, 0])}, b""
    ),
    "negative shape": lambda: rewritten(shape=[-2, -3]),
    "float shape": lambda: rewritten(shape=[2.0, 3]),
    "bool shape": lambda: rewritten(shape=[True, 6]),
    "text shape": lambda: rewritten(shape="23"),
    "object shape": lambda: rewritten(shape={"0": 2}),
    "negative offsets": lambda: rewritten(data_offsets=[-24, 0]),
    "offsets reversed": lambda: rewritten(data_offsets=[24, 0]),
    "huge offsets": lambda: rewritten(data_offsets=[10**30, 10**30 + 24]),
    "offsets of 4,000 digits": lambda: rewritten(data_offsets=[10**4000, 10**4000 + 24]),
    "float offsets": lambda: rewritten(data_offsets=[0.0, 24]),
    "three offsets": lambda: rewritten(data_offsets=[0, 24, 48]),
    "offsets an object": lambda: rewritten(data_offsets={"0": 0, "24": 24}),
    "offsets text": lambda: rewritten(data_offsets="ab"),
    "infinite offsets": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,1e999]}}'
    ),
    "NaN shape": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,24]}}'
    ),
    "hole": lambda: b.safetensors({"w": b.entry(offsets=[4, 28])}, b"0000" + b.WEIGHT),
    "overlap": lambda: b.safetensors(
        {"w": b.entry(), "v": b.entry(offsets=[12, 36])}, b.WEIGHT * 2
    ),
    "same bytes twice": lambda: b.safetensors({"w": b.entry(), "v": b.entry()}),
    "bytes of no tensor": lambda: b.safetensors({"w": b.entry()}, b.WEIGHT + b"more"),
    "unknown dtype": lambda: rewritten(dtype="F31"),
    "dtype a list": lambda: rewritten(dtype=["F32"]),
    "dtype missing": lambda: b.safetensors({"w": {"shape": [2, 3], "data_offsets": [0, 24]}}),
    "entry a list": lambda: b.safetensors({"w": ["F32", [2, 3], [0, 24]]}),
    "entry a text": lambda: b.safetensors({"w": "dtype"}),
    "entry null": lambda: b.safetensors({"w": None}),
    "metadata a list": lambda: b.safetensors({"__metadata__": ["a"], "w": b.entry()}),
    "metadata of numbers": lambda: b.safetensors({"__metadata__": {"a": 1}, "w": b.entry()}),
    "metadata nested": lambda: b.safetensors({"__metadata__": {"a": {"b": "c"}}, "w": b.entry()}),
    "metadata a number": lambda: b.safetensors({"__metadata__": 3, "w": b.entry()}),
    "metadata surrogates": lambda: b.safetensors(
        b'{"__metadata__":{"a":"\\ud800"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    ),
    "header a list": lambda: b.safetensors(b"[]"),
    "header a number": lambda: b.safetensors(b"1"),
    "header in utf-16": lambda: b.safetensors(json.dumps({"w": b.entry()}).encode("utf-16-le")),
    "header no utf-8": lambda: b.safetensors(b'{"\xff":{}}'),
    "name with control characters": lambda: b.safetensors({"\x1b]0;x\x07\n[/red]\0": b.entry()}),
    "name a path": lambda: b.safetensors({"../../../etc/passwd": b.entry()}),
    "name empty": lambda: b.safetensors({"": b.entry()}),
    "name a lone surrogate": lambda: b.safetensors(
        b'{"\\ud800":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    ),
    "name of a megabyte": lambda: b.safetensors({"w" * 1_000_000: b.entry()}),
    "name __metadata__ alone": lambda: b.safetensors({"__metadata__": {}}, b""),
    "four bits, odd": lambda: rewritten(dtype="F4", shape=[49]),
    "four bits, no dims": lambda: rewritten(dtype="F4", shape=[]),
    "20,000 empty tensors": lambda: b.safetensors(
        {str(i): b.entry(shape=[0], offsets=[0, 0]) for i in range(20_000)}, b""
    ),
    "1,000,000 empty lists": lambda: b.safetensors(
        b'{"w":[' + b",".join([b"[]"] * 1_000_000) + b"]}"
    ),
}


@pytest.mark.parametrize("name", list(SAFETENSORS))
def test_safetensors(name: str, tmp_path: Path) -> None:
    path = tmp_path / "src" / "x.safetensors"
    path.parent.mkdir()
    path.write_bytes(SAFETENSORS[name]())
    outcome = attack(path, to=("safetensors", "torch-save"))
    assert outcome.answered, str(outcome)


DAMAGED_SAFETENSORS = (
    "name twice",
    "shape overflows",
    "negative shape",
    "float shape",
    "hole",
    "overlap",
    "same bytes twice",
    "bytes of no tensor",
    "unknown dtype",
    "bool shape",
    "three offsets",
    "metadata a list",
    "metadata of numbers",
    "metadata a number",
    "header in utf-16",
    "offsets an object",
    "unknown field nested deeper",
)


@pytest.mark.parametrize("name", DAMAGED_SAFETENSORS)
def test_safetensors_that_must_be_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "src" / "x.safetensors"
    path.parent.mkdir()
    path.write_bytes(SAFETENSORS[name]())
    outcome = attack(path, to=("safetensors",))
    assert (outcome.kind, outcome.exit_code) == ("error", 3), str(outcome)


def test_a_field_that_safetensors_reads_is_read(tmp_path: Path) -> None:
    path = tmp_path / "src" / "x.safetensors"
    path.parent.mkdir()
    path.write_bytes(SAFETENSORS["unknown field nested as deep as is read"]())
    outcome = attack(path, to=("safetensors",))
    assert outcome.kind == "ok", str(outcome)


def index(weight_map: Any, **more: Any) -> bytes:
    return json.dumps({"weight_map": weight_map} | more).encode()


INDEXES: dict[str, Callable[[], bytes]] = {
    "climbs out": lambda: index({"w": "../secret.safetensors"}),
    "climbs out and back": lambda: index({"w": "../ck/model.safetensors"}),
    "climbs inside": lambda: index({"w": "sub/../model.safetensors"}),
    "dot": lambda: index({"w": "./model.safetensors"}),
    "absolute": lambda: index({"w": "/etc/passwd"}),
    "absolute on windows": lambda: index({"w": "C:\\x.safetensors"}),
    "backslashes": lambda: index({"w": "..\\secret.safetensors"}),
    "url": lambda: index({"w": "file:///etc/passwd"}),
    "missing file": lambda: index({"w": "model-2.safetensors"}),
    "empty name": lambda: index({"w": ""}),
    "folder": lambda: index({"w": "."}),
    "itself": lambda: index({"w": "model.safetensors.index.json"}),
    "name with NUL": lambda: index({"w": "model.safetensors\0"}),
    "name of a megabyte": lambda: index({"w": "m" * 1_000_000}),
    "lone surrogate": lambda: b'{"weight_map":{"w":"\\ud800"}}',
    "number for a file": lambda: index({"w": 3}),
    "list for a file": lambda: index({"w": ["model.safetensors"]}),
    "null": lambda: index(None),
    "list": lambda: index([]),
    "empty": lambda: index({}),
    "no weight_map": lambda: b"{}",
    "a list at the top": lambda: b"[]",
    "a text at the top": lambda: b'"weight_map"',
    "not JSON": lambda: b"{",
    "no bytes": lambda: b"",
    "nested deep": lambda: b'{"weight_map":' + b"[" * 500_000,
    "metadata a list": lambda: index({"w": "model.safetensors"}, metadata=[]),
    "metadata nested deep": lambda: b'{"metadata":' + b"[" * 500_000,
    "total_size a text": lambda: index({"w": "model.safetensors"}, metadata={"total_size": "24"}),
    "total_size a list": lambda: index({"w": "model.safetensors"}, metadata={"total_size": [24]}),
    "total_size an object": lambda: index({"w": "model.safetensors"}, metadata={"total_size": {}}),
    "total_size a float": lambda: index({"w": "model.safetensors"}, metadata={"total_size": 24.5}),
    "total_size NaN": lambda: (
        b'{"weight_map":{"w":"model.safetensors"},"metadata":{"total_size":NaN}}'
    ),
    "total_size infinite": lambda: (
        b'{"weight_map":{"w":"model.safetensors"},"metadata":{"total_size":1e999}}'
    ),
    "total_size of 4,000 digits": lambda: index(
        {"w": "model.safetensors"}, metadata={"total_size": 10**4000}
    ),
    "more names than tensors": lambda: index({str(i): "model.safetensors" for i in range(50_000)}),
}


@pytest.mark.parametrize("name", list(INDEXES))
def test_index(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "src" / "ck"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b.safetensors({"w": b.entry()}))
    (tmp_path / "src" / "secret.safetensors").write_bytes(b.safetensors({"w": b.entry()}))
    (folder / "model.safetensors.index.json").write_bytes(INDEXES[name]())
    outcome = attack(folder, to=("safetensors", "torch-save"))
    require_honest(outcome)
    if name.startswith(("climbs", "absolute", "backslashes", "url")):
        assert outcome.kind == "error", "a file outside was read"


@pytest.mark.parametrize("name", list(INDEXES))
def test_bin_index(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "src" / "ck"
    b.torch_file(folder / "model.safetensors", b.program(b.dct(w=b.tensor())))
    (folder / "pytorch_model.bin.index.json").write_bytes(INDEXES[name]())
    require_honest(attack(folder, to=("safetensors", "torch-save")))
