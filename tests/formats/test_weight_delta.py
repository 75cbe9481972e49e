"""Weight deltas of reinforcement learning are called so, and taken for weights by no command.

Imitations of what slime's ``UpdateWeightFromDiskDelta`` (2026) writes: safetensors of compressed
bytes by the weights' names, with checksums in the headers, and an index; and of ModelExpress's
``encode_bucket`` (2026).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import convert_to
from safetensors.torch import save_file

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.errors import SourceError, Unsupported

ZSTD = torch.tensor([0x28, 0xB5, 0x2F, 0xFD, 0, 1, 2, 3], dtype=torch.uint8)
SAID = {
    "version": "000002",
    "base_version": "000001",
    "delta_encoding": "xor",
    "compression_format": "zstd",
    "checksum_format": "xxh3-128",
}
WORDS = r"a weight delta of reinforcement learning, not weights \(version"


def by_slime(folder: Path, **changed: Any) -> Path:
    """A version's folder; a key that is None is left out of what the index says."""
    folder.mkdir()
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    file = "model-00000-of-00001.safetensors"
    save_file({n: ZSTD.clone() for n in names}, folder / file, dict.fromkeys(names, "0f" * 16))
    said = {key: value for key, value in (SAID | changed).items() if value is not None}
    index = {"metadata": said, "weight_map": dict.fromkeys(names, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"delta_encoding": "overwrite", "checksum_format": "adler32"},
        {"base_version": 1, "version": 2, "compression_format": None},
        {"delta_encoding": "of a later version"},
        {"delta_encoding": None},
        {"base_version": None},
    ],
)
def test_an_index_says_so(changed: dict[str, Any], out: Path) -> None:
    source = by_slime(out / "weight_v000002", **changed)
    opened = open_checkpoint(source)
    assert opened.catalog.info["delta"].startswith("version ")
    (finding,) = [each for each in ckptool.verify(source).findings if each.code == "weight-delta"]
    assert finding.hint
    for to in ("dcp", "hf", "torch-save"):
        with pytest.raises(Unsupported, match=WORDS):
            convert_to(to, source, out / ("m.pt" if to == "torch-save" else "m"))
    with pytest.raises(Unsupported, match=WORDS):
        ckptool.reshard(source, out / "m", mesh="2", to="dcp")
    assert sorted(path.name for path in out.iterdir()) == ["weight_v000002"]


def test_the_header_of_one_file_says_so(out: Path) -> None:
    save_file({"w": ZSTD}, out / "delta.safetensors", SAID)
    with pytest.raises(Unsupported, match=WORDS):
        convert_to("torch-save", out / "delta.safetensors", out / "m.pt")


@pytest.mark.parametrize(
    "said", [{"version": "2"}, {"base_version": "1"}, {"delta_encoding": None}, {"total_size": 16}]
)
def test_a_version_alone_makes_no_delta(said: dict[str, Any], out: Path) -> None:
    source = by_slime(out / "m", **(dict.fromkeys(SAID) | said))
    assert "delta" not in open_checkpoint(source).catalog.info
    convert_to("torch-save", source, out / "m.pt")


def bucket(**more: Any) -> bytes:
    header = json.dumps({"schema": "mx.canonical.delta.v0.bucket", "delta": "xor", **more}).encode()
    return b"MXCDV0\0" + struct.pack(">I", len(header)) + header + bytes(ZSTD.tolist())


@pytest.mark.parametrize("name", ["bucket-00000.bin", "bucket-00000", "0.delta"])
def test_a_bucket_of_modelexpress_is_called_so(name: str, out: Path) -> None:
    (out / "rev").mkdir()
    (out / "rev" / name).write_bytes(bucket(ordinal=0))
    words = "a weight delta of reinforcement learning by ModelExpress"
    for source in (out / "rev", out / "rev" / name):
        with pytest.raises(SourceError, match=words):
            convert_to("dcp", source, out / "m")
