"""States unlike any of DeepSpeed's are refused, whatever is wrong in them and wherever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from conftest import case
from msgspec.structs import replace
from trials import trials

from ckptool.errors import CkptoolError
from ckptool.formats import FORMATS
from ckptool.formats.base import ScanOptions
from ckptool.formats.deepspeed import states as _deepspeed_read
from ckptool.formats.deepspeed import universal as _deepspeed_zero_folder
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.source import Source
from ckptool.storage.local import LocalSource

ODD: list[Any] = [None, 0, -1, 1 << 70, "x", [], {}, (), [1], {"a": 1}, {1: 2}, 1.5, b"z", [[]]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    other = dict(value) if isinstance(value, dict) else list(value)
    other[path[0]] = changed(value[path[0]], path[1:], odd)
    return other


@pytest.mark.trials
@pytest.mark.parametrize(
    "name", ["deepspeed_zero_2", "deepspeed_zero_3", "deepspeed_universal", "deepspeed_pipeline"]
)
def test_a_changed_state_is_refused_or_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = LocalSource.folder(case(name).path)
    reader = FORMATS[case(name).facts["format"]]
    files = {f: read_torch_file(source, f) for f in source.files if f.endswith(".pt")}
    chosen = random.Random(name)

    def read(_: Source, file: str) -> TorchFile:
        opened = files[file]
        if file != target:
            return opened
        path = chosen.choice(list(places(opened.inert)))
        return replace(opened, inert=changed(opened.inert, path, chosen.choice(ODD)))

    for module in (_deepspeed_read, _deepspeed_zero_folder):
        monkeypatch.setattr(module, "read_torch_file", read)
    for _ in range(trials(60)):
        target = chosen.choice(list(files))
        with suppress(CkptoolError):
            reader.scan(source, ScanOptions())
