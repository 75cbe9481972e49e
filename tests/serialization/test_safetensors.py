"""One safetensors file: the library reads our layout, and we read the library's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits
from fuzz_target import one_file
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.torch import save
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.core.box import Box
from ckptool.core.dtype import BY_NAME, BY_SAFETENSORS
from ckptool.core.layout import Data, Literal, Part
from ckptool.errors import Damaged, Unsupported
from ckptool.serialization import safetensors_header
from ckptool.serialization.safetensors import (
    OutgoingSlice,
    lay_out_safetensors,
    looks_like_safetensors,
    read_safetensors,
)
from ckptool.storage.local import LocalSource

DTYPES = [dtype.name for dtype in BY_SAFETENSORS.values() if dtype.packed == 1]
TENSORS = st.dictionaries(
    st.text(max_size=6).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
    max_size=5,
)


def some(name: str, shape: list[int]) -> torch.Tensor:
    count = torch.Size(shape).numel() * BY_NAME[name].itemsize
    data = (torch.arange(count) % 2).to(torch.uint8)
    return data.view(getattr(torch, name)).reshape(shape)


def read(data: bytes) -> Any:
    return read_safetensors(one_file(data, "f"), "f")


def content(part: Part, state: dict[str, torch.Tensor]) -> bytes:
    assert isinstance(part, Data | Literal)
    return part.data if isinstance(part, Literal) else bits(state[part.name])[2]


@given(TENSORS, st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
def test_the_library_reads_what_is_laid_out(
    shapes: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    state = {name: some(dtype, shape) for name, (dtype, shape) in shapes.items()}
    slices = [OutgoingSlice(n, BY_NAME[shapes[n][0]], Box.whole(shapes[n][1])) for n in state]
    layout = lay_out_safetensors("f", slices, metadata)
    parts = [content(p, state) for p in layout.parts]
    data = b"".join(parts)
    assert len(data) == layout.nbytes
    theirs = {n: (t["dtype"], t["shape"], bytes(t["data"])) for n, t in deserialize(data)}
    assert theirs == {
        n: (BY_NAME[shapes[n][0]].safetensors, shapes[n][1], bits(t)[2]) for n, t in state.items()
    }
    assert read(data).metadata == metadata


@given(TENSORS)
def test_what_the_library_writes_is_read(shapes: dict[str, tuple[str, list[int]]]) -> None:
    state = {name: some(dtype, shape) for name, (dtype, shape) in shapes.items()}
    data = save(state)
    found = read(data).tensors
    assert {n: (s.dtype.name, list(s.shape)) for n, s in found.items()} == shapes
    for name, item in found.items():
        nbytes = len(bits(state[name])[2])
        assert data[item.at.offset : item.at.offset + nbytes] == bits(state[name])[2]


def test_tensors_are_aligned_to_their_elements() -> None:
    slices = [
        OutgoingSlice(n, BY_NAME[n], Box.whole((3,))) for n in ("bool", "float64", "bfloat16")
    ]
    layout = lay_out_safetensors("f", slices, {})
    offset = 0
    for part in layout.parts:
        assert not isinstance(part, Data) or offset % part.itemsize == 0
        offset += part.nbytes


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def file_of(header: Any, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("name", ["a", "9" * 21, "\u00e9", "\U0001f600"])
def test_the_good_one_is_good(name: str) -> None:
    assert list(read(file_of({name: GOOD["a"]})).tensors) == [name]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (bytes(7), "truncated"),
        ((99).to_bytes(8, "little"), "truncated"),
        ((0x280).to_bytes(8, "little") + b'{"a":', "the header should have 640 bytes"),
        (file_of(b"{"), "not valid JSON"),
        (file_of(b"\xff\xfe"), "not a JSON object"),
        (file_of([]), "not a JSON object"),
        (file_of({"a": 1}), "lacks dtype"),
        (file_of({"a": {"dtype": "F32", "shape": [2]}}), "lacks dtype"),
        (file_of({"a": {**GOOD["a"], "dtype": "F33"}}), "F33"),
        (file_of({"a": {**GOOD["a"], "dtype": [1]}}), "element type"),
        (file_of({"a": {**GOOD["a"], "shape": 2}}), "natural numbers"),
        (file_of({"a": {**GOOD["a"], "shape": [-2]}}), "natural numbers"),
        (file_of({"a": {**GOOD["a"], "shape": [2.0]}}), "natural numbers"),
        (file_of({"a": {**GOOD["a"], "shape": [True, 2]}}), "natural numbers"),
        (file_of({"a": {**GOOD["a"], "shape": [3]}}), "needs 12 bytes"),
        (file_of({**GOOD, "b": {**GOOD["a"], "shape": [2.0]}}), "natural numbers"),
        (file_of({**GOOD, "b": {**GOOD["a"], "data_offsets": [8, 20]}}), "its offsets give 12"),
        (file_of({"a": {**GOOD["a"], "data_offsets": [0, 8, 9]}}), "lacks dtype"),
        (file_of(GOOD, bytes(9)), "extra bytes at the end"),
        (file_of(GOOD, bytes(7)), "truncated"),
        (file_of({"a": {**GOOD["a"], "data_offsets": [4, 12]}}, bytes(12)), "a gap"),
        (file_of({**GOOD, "b": GOOD["a"]}), "overlaps"),
        (file_of({"__metadata__": {"a": 1}, **GOOD}), "text to text"),
        (file_of(b'{"a":1,"a":1}'), "twice"),
        (file_of(b'{"\\ud800":{}}'), "not valid JSON"),
        (file_of({"a": {**GOOD["a"], "more": int("9" * 21)}}), "a number of 21 digits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_rule_that_is_broken_is_named(data: bytes, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        read(data)


@given(st.binary(max_size=64))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    try:
        read(data)
    except Damaged:
        return
    assert looks_like_safetensors(data[:9])


BESIDE = {"__metadata__": {"format": "pt"}, "b": {"dtype": "BF16", "shape": [], "x": 1}} | GOOD
INSERTED = [
    b'"dtype":"F32",',
    b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},',
    b'"b":{"dtype":"F32","shape":[0],"x":1},',
    b'"b":{"dtype":"F32","data_offsets":[0,0],"x":1},',
    b'"b":{"shape":[0],"data_offsets":[0,0],"x":1},',
    b'"b":{"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]},',
    b'"__metadata__":{"x":1},',
    b'"__metadata__":{"x":"1","x":"1"},',
    b'"__metadata__":null,',
]
REPLACED = [b"null", b"true", b"2.0", b"-0", b"NaN", b"01", b"1e1", b"[]", b'"F4"', b"9" * 19]


def changed_headers() -> list[bytes]:
    texts = [json.dumps(header).encode() for header in (GOOD, BESIDE)]
    texts += [b"{" + more + text[1:] for text in texts for more in INSERTED]
    texts += [
        text[: found.start()] + other + text[found.end() :]
        for text in texts[:2]
        for found in re.finditer(rb'[0-9]+|"[^"]*"|\[[^]]*]', text)
        for other in REPLACED
    ]
    texts += [t[:at] + bytes([t[at] ^ 1]) + t[at + 1 :] for t in texts[:2] for at in range(len(t))]
    return texts


METADATA = [
    b"[]",
    b"{}",
    b"null",
    b'""',
    b"0",
    b"false",
    b'[["a","b"]]',
    b'{"a":null}',
    b'{"a":[]}',
]
AFTER = [b"  ", b"\n", b"\0", b"}"]
STRICTER = "twice|not a JSON object|lacks dtype|not text|whole bytes"
"""Why files are refused that the library opens: the format's own rules forbid what they do."""


def test_no_file_is_sound_that_the_library_does_not_open() -> None:
    good = json.dumps(GOOD).encode()
    texts = [*changed_headers(), *map(good.__add__, AFTER)]
    texts += [b'{"__metadata__":%s,' % each + good[1:] for each in METADATA]
    texts += [text.replace(b"[0,", b"[-0,") for text in texts[:40]]
    texts += [json.dumps(GOOD | {"b-0": GOOD["a"] | {"x": n}}).encode() for n in (1e999, -1e999)]
    answers = {data: (is_opened(data), outcome(data[8:-8])) for data in map(file_of, texts)}
    assert not [d for d, (opens, said) in answers.items() if not opens and said.startswith("Safe")]
    refused = [said for opens, said in answers.values() if opens and not said.startswith("Safe")]
    assert all(re.search(STRICTER, said) for said in refused)
    assert sum(opens for opens, _ in answers.values()) > len({*refused}) > 0


def is_opened(data: bytes) -> bool:
    try:
        deserialize(data)
    except Exception:
        return False
    return True


def test_a_header_at_once_is_what_it_is_entry_by_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = changed_headers()
    at_once = [outcome(text) for text in texts]
    assert len({*at_once}) > 20
    assert safetensors_header._read_valid(texts[0], "f", 0)
    monkeypatch.setattr(safetensors_header, "_read_valid", lambda *_: read(b""))  # Damaged
    assert at_once == [outcome(text) for text in texts]


def outcome(text: bytes) -> str:
    try:
        return repr(read(file_of(text)))
    except Damaged as error:
        return str(error)


def test_four_bit_elements_are_counted_in_pairs(tmp_path: Path) -> None:
    state = {"w": torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)}
    found = read(save(state)).tensors["w"]
    assert (found.dtype.name, found.shape) == ("float4_e2m1fn_x2", (2, 3))


def test_six_bit_elements_are_counted_in_fours_and_kept(tmp_path: Path) -> None:
    """safetensors 0.8 has their types, torch 2.15 does not."""
    entries: dict[str, Any] = {}
    at = 0
    kinds = [("F6_E2M3", [3, 4], 9), ("F6_E3M2", [2, 1, 8], 12), ("F6_E3M2", [0], 0)]
    kinds += [("F8_E8M0", [3], 3), ("F4", [1, 2], 1), ("BF16", [3], 6), ("F6_E2M3", [4], 3)]
    for dtype, shape, nbytes in kinds:
        entries[f"t{at}.{nbytes}"] = {
            "dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]
        }  # fmt: skip
        at += nbytes
    data = header_of(json.dumps(entries).encode()) + bytes(range(at))
    (tmp_path / "m.safetensors").write_bytes(data)
    assert ckptool.verify(tmp_path / "m.safetensors", write_manifest=tmp_path / "m.json").ok
    ckptool.convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors")
    assert ckptool.verify(tmp_path / "o.safetensors", manifest=tmp_path / "m.json").ok
    stored = [
        dict(deserialize((tmp_path / f).read_bytes())) for f in ("m.safetensors", "o.safetensors")
    ]
    assert stored[0] == stored[1]
    for target in ("o.pt", "dcp"):
        with pytest.raises(Unsupported, match="torch has no element type float6"):
            ckptool.convert(
                tmp_path / "m.safetensors", tmp_path / target, to="dcp" if target == "dcp" else None
            )


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16"),
        b'\xef\xbb\xbf{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b' {"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"__metadata__":{"a":"\\ud800"}}',
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[' + b"0," * 99 + b'0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":[[]],"shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"x":' + b"[" * 5000 + b"]" * 5000 + b"}}",
        b'{"a":' * 5000 + b"{}" + b"}" * 5000,
    ],
)
def test_headers_beyond_all_bounds(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(Damaged):
        read_safetensors(LocalSource.file(path), path.name)


NAMES = st.sampled_from(["a", ":", ":a", "é", '\\"'])
COLONS = st.sampled_from([":", " :", ": ", "\t:"])


@given(st.lists(st.tuples(NAMES, COLONS, st.sampled_from(["u", "dtype"]), COLONS), max_size=3))
def test_a_name_twice_is_found_however_it_is_written(
    entries: list[tuple[str, str, str, str]],
) -> None:
    one = '"%s"%s{"dtype":"U8","%s"%s"U8","shape":[0],"data_offsets":[0,0]}'
    data = header_of(("{" + ",".join(one % entry for entry in entries) + "}").encode())
    names = [name for name, *_ in entries]
    if len({*names}) < len(names) or any(inner == "dtype" for _, _, inner, _ in entries):
        with pytest.raises(Damaged, match="twice"):
            read(data)
    else:
        assert {*read(data).tensors} == {name.removeprefix("\\") for name in names}


def test_a_name_that_is_not_an_unicode_cannot_be_written() -> None:
    item = OutgoingSlice("a\ud800", BY_NAME["uint8"], Box.whole((1,)))
    with pytest.raises(Unsupported, match="Unicode"):
        lay_out_safetensors("x.safetensors", [item], {})


def header_of(entries: bytes) -> bytes:
    return len(entries).to_bytes(8, "little") + entries


@pytest.mark.parametrize("piece", [b'"a":{},', b'"a":"",', b'"a":[[],[]],', b'"a":[0,0,0],'])
def test_a_header_of_too_many_entries_is_refused(piece: bytes, tmp_path: Path) -> None:
    many = piece * 2_000_000
    (tmp_path / "a.safetensors").write_bytes(header_of(b"{" + many[:-1] + b"}"))
    with pytest.raises(Unsupported, match=r"ckptool reads up to 300,000 and 9,600,000"):
        ckptool.open(tmp_path / "a.safetensors")


def test_a_header_beyond_the_limits_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    one = '"%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    text = ",".join(one % (n, n, n + 1) for n in range(300_001))
    path.write_bytes(header_of(b"{" + text.encode() + b"}") + bytes(300_001))
    for command in (["inspect", path], ["convert", path, tmp_path / "m", "--to", "dcp"]):
        error = CliRunner().invoke(app, list(map(str, command))).exception
        assert isinstance(error, Unsupported)
        assert "300,002 entries" in error.message
    codes = [one.code for one in verify(path, VerifyOptions()).findings]
    assert "limit-exceeded" in codes
    assert "safetensors-header" not in codes


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (lambda: [f"w{n}" for n in range(300_000)], ()),
        (lambda: ["{" * 300_000], ()),
        (lambda: ["w" * 100_000_000], ()),
        (lambda: ["__metadata__"], ()),
        (lambda: ["w"], (1,) * 65),
    ],
    ids=["entries", "braces", "bytes", "metadata", "dims"],
)
def test_nothing_is_written_that_could_not_be_read(
    names: Callable[[], list[str]], shape: tuple[int, ...]
) -> None:
    box = Box.whole(shape)
    items = [OutgoingSlice(name, BY_NAME["uint8"], box) for name in names()]
    with pytest.raises(Unsupported, match=r"ckptool reads up to|the format allows|__metadata__"):
        lay_out_safetensors("x.safetensors", items, {"format": "pt"})


def test_a_hundred_thousand_tensors_are_read(tmp_path: Path) -> None:
    one = '"layers.%d.weight":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    text = ",".join(one % (n, n, n + 1) for n in range(100_000))
    path = tmp_path / "a.safetensors"
    path.write_bytes(header_of(b"{" + text.encode() + b"}") + bytes(100_000))
    assert len(read_safetensors(LocalSource.file(path), path.name).tensors) == 100_000
