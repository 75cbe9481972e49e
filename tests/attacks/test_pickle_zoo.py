"""Hostile pickles, by technique, in every place where a checkpoint may hold one.

Nothing a pickle names is imported or called, nothing it claims takes memory or time without end,
and no carrier of code is passed on as harmless.
"""

from __future__ import annotations

import pickletools
import struct
from pathlib import Path

import attack_build as b
import pytest
from attack_harness import (
    SECONDS,
    VERIFY,
    Outcome,
    attack,
    attack_all,
    place_canary,
)
from endless_pickles import BOMBS
from hostile_pickles import ABUSE, HOSTILE, UNKNOWN

ALL = {
    **{f"hostile: {name}": body for name, body in HOSTILE.items()},
    **{f"unknown: {name}": body for name, body in UNKNOWN.items()},
    **{f"abuse: {name}": body for name, body in ABUSE.items()},
    **{f"bomb: {name}": body for name, body in BOMBS.items()},
}


def in_zip(folder: Path, body: bytes) -> Path:
    return b.torch_file(folder / "x.pt", b.beside(body))


def in_zip_as_the_whole(folder: Path, body: bytes) -> Path:
    return b.torch_file(folder / "x.pt", b.program(body))


def in_legacy(folder: Path, body: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "x.pt").write_bytes(b.legacy(b.beside(body)))
    return folder / "x.pt"


def in_dcp_metadata(folder: Path, body: bytes) -> Path:
    data = b.item()
    where = b.where(b.text("__0_0.distcp"), b.number(0), b.number(len(data)))
    meta = b.metadata(
        [(b.text("w"), b.tensor_meta(b.size(2, 3), b.chunk(b.size(0, 0), b.size(2, 3))))],
        [(b.index(b.text("w"), b.size(0, 0)), where)],
        extra=body,
    )
    return b.dcp(folder / "ck", data, meta)


def in_dcp_value(folder: Path, body: bytes) -> Path:
    return b.value_dcp(folder / "ck", b.program(body))


def in_metadata_pkl(folder: Path, body: bytes) -> Path:
    b.torch_file(folder / "ck" / "model_0.pt", b.program(b.dct(w=b.tensor())))
    b.torch_file(folder / "ck" / "model_1.pt", b.program(b.dct(w=b.tensor())))
    fields = b.dct(version=b.text("2.0"), world_size=b.number(2), metadata=b.dct(), x=body)
    (folder / "ck" / "metadata.pkl").write_bytes(b.program(fields))
    return folder / "ck"


def on_two_ranks(folder: Path, body: bytes) -> Path:
    b.torch_file(folder / "ck" / "model_rank0.pt", b.beside(body))
    b.torch_file(folder / "ck" / "model_rank1.pt", b.beside(body))
    return folder / "ck"


PLACES = {
    "zip": in_zip,
    "zip whole": in_zip_as_the_whole,
    "legacy": in_legacy,
    "dcp metadata": in_dcp_metadata,
    "dcp value": in_dcp_value,
    "metadata.pkl": in_metadata_pkl,
    "two ranks": on_two_ranks,
}


SOME = [name for i, name in enumerate(ALL) if name.startswith("hostile: ") or i % 3 == 0]
"""Rows for the places that share all code but the last step with another place."""
EACH = list(ALL)
THREE = ("safetensors", "torch-save", "dcp")
CONVERTED = {
    "zip": (EACH, THREE),
    "zip whole": (SOME, THREE[:1]),
    "legacy": (SOME, THREE[:1]),
    "dcp metadata": (SOME, THREE[:1]),
    "dcp value": (EACH, THREE[::2]),
    "metadata.pkl": (SOME, THREE[:1]),
    "two ranks": (EACH, THREE[1:2]),
}
"""The rows of a place, and what is made of a checkpoint that holds one there."""


def faults(name: str, outcome: Outcome) -> list[str]:
    """What is wrong about how a conversion of a row ended."""
    right = outcome.answered
    if name.startswith("hostile: "):
        right = (outcome.error, outcome.exit_code) == ("Hostile", 3)
    if outcome.kind == "ok" and "w" in outcome.tensors:
        right = right and outcome.tensors["w"] == ("F32", (2, 3), b.WEIGHT)
    return [] if right else [f"{name}: {outcome}"]


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("place", CONVERTED)
def test_it_is_never_run_and_never_another_tensor(place: str, part: int, tmp_path: Path) -> None:
    """In a process a part of the rows: a fork of a large process costs more than an attack."""
    rows, targets = CONVERTED[place]
    names = rows[part::3]
    flag = place_canary(tmp_path / "canary")
    sources = [PLACES[place](tmp_path / str(i) / "src", ALL[n]) for i, n in enumerate(names)]
    outcomes = attack_all(sources, to=targets)
    assert [f for pair in zip(names, outcomes, strict=True) for f in faults(*pair)] == []
    assert not flag.exists(), "a pickle was run"


# verify reports each, but for what is odd and can neither run, nor grow, nor be mistaken

HARMLESS = {
    "abuse: OrderedDict state",
    "abuse: bytearray of text in utf-32",
    "abuse: range of 10**12",
    "abuse: slice as a key",
    "abuse: rebuild_tensor of a text",
    "abuse: reconstruct whose type is doubling",
    "abuse: conj of a list",
    "bomb: memo index 2**32-1",
    "bomb: text memo index 10**4000",
    "bomb: frame of 2**62",
    "bomb: int of 20,000 digits as text",
    "bomb: unicode escape",
    "bomb: protocol in the middle",
    "bomb: stop inside",
    "bomb: dict that holds itself",
    "bomb: ordered dict that holds itself",
    "bomb: call whose state is itself",
    "bomb: call whose state holds itself",
    "bomb: ordered dict whose state is itself",
}
"""What they claim is never made, and records that refer to themselves are in real checkpoints."""


@pytest.mark.parametrize("place", ["zip", "legacy", "dcp metadata", "dcp value", "two ranks"])
def test_verify_reports(place: str, tmp_path: Path) -> None:
    flag = place_canary(tmp_path / "canary")
    names = list(ALL)
    if place == "dcp metadata":
        names = [name for name in ALL if name.startswith("hostile: ")]
    elif place != "zip":
        names = SOME  # the machine that reads them is that of the first place
    sources = [PLACES[place](tmp_path / str(i) / "src", ALL[n]) for i, n in enumerate(names)]
    outcomes = attack_all(sources, to=(VERIFY,), seconds=6 * SECONDS)
    wrong = [
        f"{name}: {outcome}"
        for name, outcome in zip(names, outcomes, strict=True)
        if not (outcome.kind == "reported" or (outcome.kind == "ok" and name in HARMLESS))
        or (name.startswith("hostile: ") and "hostile-global" not in outcome.message)
    ]
    assert wrong == []
    assert not flag.exists(), "a pickle was run"


# What is written must not say more than what was read


def globals_written(path: Path) -> set[str]:
    """Every global that the pickles of a zip, or of the zips in a DCP file, name."""
    data = path.read_bytes()
    found: set[str] = set()
    start = -1
    while (start := data.find(b"PK\3\4", start + 1)) >= 0:
        name, extra = struct.unpack_from("<2H", data, start + 26)
        if data[start + 30 : start + 30 + name].endswith(b"data.pkl"):
            program = data[start + 30 + name + extra :]
            found |= {
                str(argument)
                for code, argument, _ in pickletools.genops(program)
                if code.name in ("GLOBAL", "INST")
            }
    return found


COMMAND_AS_PROGRAM = "collections\nOrderedDict\n0cos\nsystem\n(Vtouch EXECUTED\ntR0c"
IN_MODULE = (COMMAND_AS_PROGRAM + "collections", "OrderedDict")
IN_NAME = ("collections", COMMAND_AS_PROGRAM.partition("\n")[2] + "collections\nOrderedDict")


@pytest.mark.parametrize("to", ["dcp", "torch-save"])
@pytest.mark.parametrize(("module", "name"), [IN_MODULE, IN_NAME], ids=["module", "name"])
def test_a_newline_in_a_global_is_not_written_as_a_program(
    module: str, name: str, to: str, tmp_path: Path
) -> None:
    """STACK_GLOBAL may hold a newline; the GLOBAL opcode of a protocol 2 pickle must not."""
    body = b.call(b.stack_glob(module, name), b.number(1))
    source = in_dcp_value(tmp_path / "src", body)
    from ckptool.commands.convert import prepare
    from ckptool.commands.options.target import ConvertOptions
    from ckptool.errors import CkptoolError

    target = tmp_path / "out"
    try:
        prepare(source, target, ConvertOptions(to=to)).run()
    except CkptoolError:
        return
    files = [target] if target.is_file() else sorted(target.glob("*.distcp"))
    for file in files:
        assert not any("os system" in item for item in globals_written(file))


@pytest.mark.parametrize("body", [b"(", b"(" + b.put(5) + b"1" + b.get(5), b"((2ll"])
def test_a_mark_is_not_a_value(body: bytes, tmp_path: Path) -> None:
    """The machine's own mark must not become a value that is shown or written."""
    source = in_dcp_value(tmp_path / "src", body)
    outcome = attack(source, to=("torch-save", "dcp"))
    assert (outcome.kind, outcome.exit_code) == ("error", 3), str(outcome)


def test_a_view_in_a_legacy_persistent_id(tmp_path: Path) -> None:
    """torch before 0.4 stored views as (key, offset, size) of a root storage: not to be ignored."""
    pid = b.tup(
        b.text("storage"),
        b.glob("torch", "FloatStorage"),
        b.text("0"),
        b.text("cpu"),
        b.number(6),
        b.tup(b.text("1"), b.number(2), b.number(3)),
    )
    w = b.tensor(pid + b"Q", shape=b.tup(b.number(3)), strides=b.tup(b.number(1)))
    path = tmp_path / "src" / "x.pt"
    path.parent.mkdir()
    path.write_bytes(b.legacy(b.program(b.dct(w=w))))
    outcome = attack(path, to=("safetensors",))
    assert outcome.answered, str(outcome)
    if outcome.kind == "ok":
        assert outcome.tensors["w"][2] == b.WEIGHT[8:20], "the view was read at the wrong place"
