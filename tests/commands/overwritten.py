"""Checkpoints with files of others among theirs, and runs that replace them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckptool.commands.convert import prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, TransferOptions

FOREIGN = {
    "train.py": b"import torch",
    "src/model.py": b"class Model: ...",
    "src/deep/er/notes.txt": b"remember",
    ".git/HEAD": b"ref: refs/heads/main",
    "wandb/run-1/log.txt": b"loss 1.0",
    "tokenizer.json": b"{}",
    "events.out.tfevents.1": b"\x00\x01",
    "empty/.keep": b"",
}


def put_foreign(folder: Path) -> None:
    for name, data in FOREIGN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "bare").mkdir()
    (folder / "link").symlink_to("train.py")


def foreign_of(folder: Path) -> dict[str, bytes]:
    assert (folder / "bare").is_dir()
    assert os.readlink(folder / "link") == "train.py"
    return {name: (folder / name).read_bytes() for name in FOREIGN}


def ready(source: Path, target: Path, to: str = "dcp", **more: Any) -> Any:
    run = RunOptions(workers=1, fsync=more.pop("fsync", False))
    return prepare(source, target, ConvertOptions(to, transfer=TransferOptions(run=run, **more)))


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
