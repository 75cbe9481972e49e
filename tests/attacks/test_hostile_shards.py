"""Hostile metadata of torch_checkpointing and of DCP's safetensors shards."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import attack_build as b
import pytest
from attack_harness import attack
from dcp_records import BOMB, Make, number, text


def declared(body: bytes | None = None, **fields: bytes) -> Make:
    """One rank's safetensors file whose sharding only ``metadata.pkl`` knows."""

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "model_0.safetensors").write_bytes(b.safetensors({"w": b.entry()}))
        items = b.dct(version=text("2.0"), world_size=number(1), metadata=b.dct())
        if body is not None:
            records = b.pairs((text('["w"]'), body))
            items = b.dct(
                version=text("2.0"),
                world_size=number(1),
                metadata=b.dct(model=b.dct(nested_path_to_metadata=records)),
            )
        if fields:
            items = b.dct(**({"world_size": number(1), "metadata": b.dct()} | fields))
        (folder / "metadata.pkl").write_bytes(b.program(items))
        return folder

    return make


def record(data: bytes, kind: str = "DTensorShardingMetadata") -> bytes:
    return b.lst(b.dct(sharding_metadata=b.dct(type=text(kind), data=data), ranks=b.lst(number(0))))


def json_family(content: bytes) -> Make:
    def make(folder: Path) -> Path:
        declared()(folder)
        (folder / "state_0.json").write_bytes(content)
        return folder

    return make


INFINITY = b"G" + struct.pack(">d", float("inf"))


DECLARED: dict[str, Make] = {
    "world size infinite": declared(world_size=INFINITY),
    "world size 10**11": declared(world_size=number(10**11)),
    "world size 10**6000": declared(world_size=number(10**6000)),
    "world size negative": declared(world_size=number(-5)),
    "world size text": declared(world_size=text("many")),
    "metadata a list": declared(metadata=b"]"),
    "metadata doubling": declared(metadata=BOMB),
    "path not JSON": declared(
        metadata=b.dct(model=b.dct(nested_path_to_metadata=b.pairs((text("["), b"]"))))
    ),
    "path nested deep": declared(
        metadata=b.dct(model=b.dct(nested_path_to_metadata=b.pairs((text("[" * 100_000), b"]"))))
    ),
    "ranks infinite": declared(b.lst(b.dct(sharding_metadata=b.dct(), ranks=b.lst(INFINITY)))),
    "record a text": declared(b.lst(b.dct(sharding_metadata=text("x"), ranks=b.lst(number(0))))),
    "record None": declared(b.lst(b.dct(sharding_metadata=b"N", ranks=b.lst(number(0))))),
    "record empty": declared(record(b.dct())),
    "record data None": declared(record(b"N")),
    "mesh empty": declared(
        record(b.dct(mesh_spec=b.dct(), global_shape=b.lst(number(2), number(3))))
    ),
    "mesh doubling": declared(
        record(
            b.dct(
                global_shape=b.lst(number(2), number(3)),
                mesh_spec=b.dct(mesh_shape=b.lst(number(1)), mesh_data=BOMB, mesh_dim_names=b"N"),
                placements=b"]",
            )
        )
    ),
    "mesh itself": declared(
        record(
            b.dct(
                global_shape=b.lst(number(2), number(3)),
                mesh_spec=b.dct(
                    mesh_shape=b.lst(number(1)), mesh_data=b"]" + b.put(9) + b.get(9) + b"a"
                ),
                placements=b"]",
            )
        )
    ),
    "placement of no type": declared(
        record(
            b.dct(
                global_shape=b.lst(number(2), number(3)),
                mesh_spec=b.dct(mesh_shape=b.lst(number(1)), mesh_data=b.lst(number(0))),
                placements=b.lst(b.dct()),
            )
        )
    ),
    "json not JSON": json_family(b"{"),
    "json a list": json_family(b"[1]"),
    "json nested deep": json_family(b"[" * 500_000),
    "json empty": json_family(b""),
    "json NaN": json_family(b'{"a": NaN}'),
}


@pytest.mark.parametrize("name", list(DECLARED))
def test_declared(name: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    outcome = attack(DECLARED[name](tmp_path / "src" / "ck"), to=("safetensors",))
    assert outcome.answered, str(outcome)


def shard_file(folder: Path, offsets: Any, name: str = "shard-00001-model-00001-of-00001") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = offsets if isinstance(offsets, str) else json.dumps({"w": {"saved_offsets": offsets}})
    header = {"__metadata__": {"DCP_SHARDING_INFO": info}, "w": b.entry()}
    (folder / f"{name}.safetensors").write_bytes(b.safetensors(header))
    return folder


SHARDS: dict[str, Make] = {
    "offsets infinite": lambda f: shard_file(f, '{"w":{"saved_offsets":[1e999,0]}}'),
    "offsets NaN": lambda f: shard_file(f, '{"w":{"saved_offsets":[NaN,0]}}'),
    "offsets negative": lambda f: shard_file(f, [-1, 0]),
    "offsets huge": lambda f: shard_file(f, [10**4000, 0]),
    "offsets text": lambda f: shard_file(f, "00"),
    "offsets too few": lambda f: shard_file(f, [0]),
    "info a list": lambda f: shard_file(f, "[]"),
    "info nested deep": lambda f: shard_file(f, "[" * 200_000),
    "info not JSON": lambda f: shard_file(f, "{"),
    "rank 0": lambda f: shard_file(f, [0, 0], "shard-00000-model-00001-of-00001"),
    "rank 99999999999": lambda f: shard_file(f, [0, 0], "shard-99999999999-model-00001-of-00001"),
    "rank 131072": lambda f: shard_file(f, [0, 0], "shard-131072-model-00001-of-00001"),
    "1 of 99999": lambda f: shard_file(f, [0, 0], "shard-00001-model-00001-of-99999"),
    "3,000 tensors": lambda f: many_slices(f, 3000),
}


def many_slices(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    info = {str(i): {"saved_offsets": [0, 0]} for i in range(count)}
    header: dict[str, Any] = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(info)}}
    header |= {str(i): b.entry(offsets=[24 * i, 24 * i + 24]) for i in range(count)}
    path = folder / "shard-00001-model-00001-of-00001.safetensors"
    path.write_bytes(b.safetensors(header, b.WEIGHT * count))
    return folder


@pytest.mark.parametrize("name", list(SHARDS))
def test_dcp_safetensors(name: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    outcome = attack(SHARDS[name](tmp_path / "src" / "ck"), to=("safetensors",))
    assert outcome.answered, str(outcome)


RANK_NAMES = [
    ("checkpoint_0.pt", "checkpoint_99999999999.pt"),
    ("checkpoint_0.pt", "checkpoint_3000000.pt"),
    ("model_world_size_99999999999_rank_0.pt", "model_world_size_99999999999_rank_1.pt"),
    ("model_rank0.pt", "model_rank" + "9" * 200 + ".pt"),
    ("model_rank\u0661.pt", "model_rank\u0660.pt"),
    ("model_rank-1.pt", "model_rank-0.pt"),
]


@pytest.mark.parametrize("names", [pytest.param(names, id=names[1][:40]) for names in RANK_NAMES])
def test_rank_file_names(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        b.torch_file(tmp_path / "src" / "ck" / name, b.program(b.dct(w=b.tensor())))
    outcome = attack(tmp_path / "src" / "ck", to=("safetensors",))
    assert outcome.answered, str(outcome)


@pytest.mark.parametrize(
    "name",
    ["model-00001-of-99999", "model-00001-of-99999999999", "model-" + "1" * 100 + "-of-00002"],
)
def test_shard_file_names(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "src" / "ck"
    folder.mkdir(parents=True)
    (folder / f"{name}.safetensors").write_bytes(b.safetensors({"w": b.entry()}))
    outcome = attack(folder, to=("safetensors",))
    assert outcome.exit_code == 3, str(outcome)
