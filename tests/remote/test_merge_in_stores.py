"""Weight deltas are applied where they are published: base, deltas and result in a store."""

from __future__ import annotations

from pathlib import Path

from conftest import FIXTURES, bits
from safetensors.torch import load
from store_server import S3, s3, server
from typer.testing import CliRunner

from ckptool.cli.app import app

DELTAS = FIXTURES / "deltas"


def test_a_chain_in_a_store_gives_what_its_trainer_had(s3: S3) -> None:
    base = s3.put(DELTAS / "base", "base")
    names = [f"weight_v{version:06d}" for version in range(1, 5)]
    deltas = [s3.put(DELTAS / "slime_xor" / name, name) for name in names]
    words = ["merge", s3.url("out"), "--apply-delta", *deltas, "--onto", base]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    (found,) = (load(data) for name, data in s3.get("out").items() if name.endswith("safetensors"))
    for name, tensor in load((DELTAS / "truth/4/model.safetensors").read_bytes()).items():
        assert bits(found[name]) == bits(tensor), name
