"""Elements that begin as some file does, or are called as one, are no such file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import case

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify

Copy = Callable[[str], Path]

HEADS = {
    "zip": b"PK\x03\x04",
    "pickle of legacy torch.save": bytes.fromhex(
        "80028a0a6cfc9c46f920 6aa85019 2e".replace(" ", "")
    ),
    "safetensors": b"\x10\0\0\0\0\0\0\0{",
    "gzip": b"\x1f\x8b\x08\0",
}
FILES = {
    "snapshot": "replicated/state/model/w",
    "snapshot_batched": None,
    "bytecheckpoint_flat": "global_step_7/model/__0_0.distcp",
}


def wrong(folder: Path) -> set[str]:
    found = verify(folder, VerifyOptions()).findings
    return {f.code for f in found if f.severity.value != "info"} - {"not-finite"}


def bare_file(folder: Path, name: str | None) -> Path:
    if name is not None:
        return folder / name
    files = [f for f in folder.rglob("*") if f.suffix == ".distcp" or f.parent.name == "batched"]
    return max(files, key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", FILES)
def test_the_first_bytes_of_a_tensor_are_its_elements(
    name: str, head: bytes, copy_of: Copy
) -> None:
    folder = copy_of(name)
    file = bare_file(folder, FILES[name])
    file.write_bytes(head + file.read_bytes()[len(head) :])
    assert wrong(folder) <= wrong(case(name).path)


@pytest.mark.parametrize(
    "ending", [".safetensors", ".index.json", ".pt", ".part", ".tmp", ".metadata", "/metadata.json"]
)
def test_a_file_called_after_its_tensor_is_what_the_manifest_says(
    ending: str, copy_of: Copy
) -> None:
    folder = copy_of("snapshot")
    old = "replicated/state/model/w"
    (folder / old).rename(folder / "moved")
    (folder / (old + ending)).parent.mkdir(exist_ok=True)
    (folder / "moved").rename(folder / (old + ending))
    manifest = folder / ".snapshot_metadata"
    manifest.write_text(manifest.read_text().replace(f'"{old}"', f'"{old}{ending}"'))
    assert wrong(folder) == set()
