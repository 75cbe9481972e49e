"""One rank of several: write and check a list of reshards, and note how each ended.

Usage: ``reshard_workers.py SOURCE OUT ROWS``, started once a rank with torchrun's environment.
ROWS is a JSON list of ``{"name", "to", "mesh", "rules", "flip"}``; ``flip`` is a tensor of which a
bit is changed between writing and checking. ``OUT/rank-{r}.json`` says how each row ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.load_check import check_loads
from ckptool.commands.reshard.reshard import Reshard, prepare_reshard
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.ranks import Ranks, join_ranks
from ckptool.errors import CkptoolError


def main() -> None:
    source, out, rows = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    with join_ranks() as group:
        ends = {row["name"]: end_of(row, source, out, group) for row in rows}
        (out / f"rank-{group.rank}.json").write_text(json.dumps(ends))


def end_of(row: dict[str, Any], source: Path, out: Path, group: Ranks) -> str:
    options = ReshardOptions(
        parse_mesh(row["mesh"]),
        tuple(map(parse_rule, row.get("rules", ()))),
        "fsdp",
        to=row["to"],
        transfer=TransferOptions(verify=True, run=RunOptions(workers=1, fsync=False)),
    )
    try:
        with group.together():
            prepared = prepare_reshard(source, out / row["name"], options)
        prepared.run(ranks=group)
        if "flip" in row:
            with group.together():
                if group.rank == 0:
                    flip(prepared, row["flip"])
        check_loads(prepared, group)
    except CkptoolError as error:
        return f"{type(error).__name__}: {error.message}"
    return "equal"


def flip(prepared: Reshard, name: str) -> None:
    """Change the lowest bit of the tensor's last stored byte of the last file that has any."""
    for file in reversed(prepared.report.files):
        offset = 0
        for part in file.parts:
            offset += part.nbytes
            if getattr(part, "name", None) == name and part.nbytes:
                path = prepared.report.target / file.path
                data = bytearray(path.read_bytes())
                data[offset - 1] ^= 1
                path.write_bytes(bytes(data))
                return


if __name__ == "__main__":
    main()
