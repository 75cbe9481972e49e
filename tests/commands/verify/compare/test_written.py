"""Wrong output is never committed; correct output is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import convert_to

from ckptool.commands.convert import ConvertReport, prepare
from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.casts import parse_casts
from ckptool.core.layout import Data, Literal, Verbatim, written_entries
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.check import written
from ckptool.engine.progress import Progress
from ckptool.engine.write import disk_target
from ckptool.engine.write.run import run as run_engine
from ckptool.errors import NotVerified
from ckptool.storage.files import ReadPolicy
from ckptool.storage.local import LocalReader, LocalSource

TARGETS = {"safetensors": "m", "torch-save": "m.pt", "dcp": "m", "dcp-safetensors": "m"}
Damage = Callable[[bytearray, int], None]


@pytest.fixture
def source(out: Path) -> Path:
    """Two tensors of one shape, a wide one and one of integers, in a file of torch's."""
    generator = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {n: torch.randn(12, 20, generator=generator) for n in ("a", "b")}
    state |= {"wide": torch.randn(3, 400, generator=generator), "count": torch.arange(11)}
    torch.save(state, out / "source.pt")
    return out / "source.pt"


def planned(source: Path, to: str, *, verify: bool = True, **more: Any) -> Transfer[ConvertReport]:
    transfer = TransferOptions(verify=verify, run=RunOptions(workers=2, fsync=False))
    target = source.with_name(TARGETS[to])
    return prepare(source, target, ConvertOptions(to, transfer=transfer, **more))


def on_disk(transfer: Transfer[ConvertReport]) -> Path:
    """What a transfer writes, which is in no store."""
    assert isinstance(transfer.target, Path)
    return transfer.target


def first_byte(transfer: Transfer[ConvertReport], name: str) -> tuple[str, int]:
    """The file in which a tensor begins, and where."""
    for file in transfer.plan.layout.files:
        offset = 0
        for part in file.parts:
            if isinstance(part, Data) and part.name == name:
                return file.path, offset
            offset += part.nbytes
    raise LookupError(name)


@pytest.fixture
def damaging(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, Damage], None]:
    """Change a staged file once it is written, before it is read back."""
    real = run_engine

    def arrange(file: str, at: int, damage: Damage) -> None:
        def run(work: Any, folder: Path, *rest: Any) -> None:
            real(work, folder, *rest)
            data = bytearray((folder / file).read_bytes())
            damage(data, at)
            (folder / file).write_bytes(data)

        monkeypatch.setattr(disk_target, "run", run)

    return arrange


def flip(data: bytearray, at: int) -> None:
    data[at + 77] ^= 1


def exchange_rows(data: bytearray, at: int) -> None:
    """The second and the third row, of 20 numbers each."""
    second, third = slice(at + 80, at + 160), slice(at + 160, at + 240)
    data[second], data[third] = data[third], data[second]


def transpose(data: bytearray, at: int) -> None:
    rows = torch.frombuffer(bytearray(data[at : at + 960]), dtype=torch.float32).reshape(12, 20)
    data[at : at + 960] = rows.T.contiguous().numpy().tobytes()


def shift(data: bytearray, at: int) -> None:
    """By one element."""
    data[at : at + 960] = data[at + 4 : at + 960] + data[at : at + 4]


def zero(data: bytearray, at: int) -> None:
    data[at : at + 960] = bytes(960)


def cut(data: bytearray, at: int) -> None:
    del data[at + 500 :]


@pytest.mark.parametrize("damage", [flip, exchange_rows, transpose, shift, zero, cut])
@pytest.mark.parametrize("to", TARGETS)
def test_other_bytes_never_count(
    to: str, damage: Damage, source: Path, damaging: Callable[..., None]
) -> None:
    transfer = planned(source, to)
    damaging(*first_byte(transfer, "a"), damage)
    with pytest.raises(NotVerified, match=r"verification failed: .*\ba\b") as error:
        transfer.run()
    assert error.value.exit_code == 5
    assert not transfer.target.exists()
    assert [path.name for path in source.parent.iterdir()] == ["source.pt"]


def test_a_replica_of_other_bytes_never_counts(source: Path, damaging: Callable[..., None]) -> None:
    transfer = TransferOptions(run=RunOptions(workers=2, fsync=False))
    options = ReshardOptions(
        parse_mesh("2"), policy="replicate", to="rank-local", transfer=transfer
    )
    resharding = prepare_reshard(source, source.with_name("m"), options)
    (file,) = (one for one in resharding.plan.layout.files if one.rank == 1)
    before = [part.nbytes for part in file.parts[: [*map(type, file.parts)].index(Data)]]
    damaging(file.path, sum(before), flip)
    with pytest.raises(NotVerified, match="1 replica differ after writing"):
        resharding.run()


def spots(transfer: Transfer[ConvertReport]) -> dict[str, tuple[str, int]]:
    """A byte of each run of bytes that is neither a tensor's nor its checksum's, and the last."""
    found: dict[str, tuple[str, int]] = {}
    for file in transfer.plan.layout.files:
        offset = 0
        for at, part in enumerate(file.parts):
            if isinstance(part, Literal | Verbatim) and part.nbytes:
                patched = [patch.at for patch in part.patches] if isinstance(part, Literal) else []
                first = next(n for n in range(99) if not any(p <= n < p + 4 for p in patched))
                found[f"{file.path} {at}"] = file.path, offset + first
            offset += part.nbytes
        found[f"{file.path} end"] = file.path, offset - 1
    return found


@pytest.mark.parametrize("to", TARGETS)
def test_other_values_headers_and_copied_files_never_count(
    to: str, source: Path, damaging: Callable[..., None]
) -> None:
    transfer = planned(source, to)
    if transfer.plan.layout.folder:
        folder = source.with_name("in")
        prepare(source, folder, ConvertOptions("safetensors")).run()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        transfer = planned(folder, to)
    for file, at in spots(transfer).values():
        damaging(file, at, change)
        with pytest.raises(NotVerified, match=rf"verification failed: .*{file}"):
            transfer.run()
        damaging(file, -1, cut_off)
        with pytest.raises(NotVerified, match="verification failed: "):
            transfer.run()
    assert not transfer.target.exists()


@pytest.mark.parametrize("tile", [64, 1 << 20])
def test_a_bit_between_small_tensors_never_counts(
    tile: int, source: Path, damaging: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is read in runs that end anywhere, with the tensors between: checksums, too."""
    monkeypatch.setattr(LocalSource, "policy", ReadPolicy(tile=tile))
    transfer = planned(source, "torch-save")
    literals, offset = list[int](), 0
    for part in transfer.plan.layout.files[-1].parts:
        if isinstance(part, Literal):
            literals += range(offset, offset + part.nbytes, 67)
            literals += [offset + patch.at + 3 for patch in part.patches]
        offset += part.nbytes
    assert len(literals) > 30
    for at in literals[::3]:
        damaging("m.pt", at, change)
        with pytest.raises(NotVerified, match=r"differ"):
            transfer.run()
    damaging("m.pt", 0, lambda data, at: None)
    transfer.run()


def change(data: bytearray, at: int) -> None:
    data[at] ^= 0x20


def cut_off(data: bytearray, at: int) -> None:
    del data[at:]


@pytest.mark.parametrize("to", TARGETS)
def test_exchanged_tensors_never_count(
    to: str, source: Path, damaging: Callable[..., None]
) -> None:
    """Each whole and of the right type and shape, and of all bytes that were written."""
    transfer = planned(source, to)
    file, one = first_byte(transfer, "a")
    assert first_byte(transfer, "b")[0] == file or to == "dcp-safetensors"
    other = first_byte(transfer, "b")[1]

    def exchange(data: bytearray, at: int) -> None:
        first, second = slice(at, at + 960), slice(other, other + 960)
        data[first], data[second] = data[second], data[first]

    damaging(file, one, exchange)
    with pytest.raises(NotVerified, match=r"2 of 4 tensors differ .* first at \[0, 0\]"):
        transfer.run()


def test_what_the_plan_itself_gets_wrong_is_found(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of another place of the source: the proof reads neither side by them."""
    from msgspec.structs import replace

    from ckptool.core.planning.plan import Plan

    real = Plan.jobs

    def jobs(self: Plan, group: Any, limit: int) -> Any:
        for tiles in real(self, group, limit):
            yield [
                replace(
                    tile,
                    sources=tuple(s._replace(chunk=wrong(s.chunk)) for s in tile.sources),
                    entry=replace(tile.entry, chunks=tuple(map(wrong, tile.entry.chunks))),
                )
                for tile in tiles
            ]

    def wrong(chunk: Any) -> Any:
        at = replace(chunk.at, offset=chunk.at.offset + 4, record=None)
        return replace(chunk, at=at)

    transfer = planned(source, "safetensors")
    monkeypatch.setattr(Plan, "jobs", jobs)
    with pytest.raises(NotVerified, match="4 of 4 tensors differ"):
        transfer.run()


REWRITES = {
    "cast": RewriteOptions(casts=parse_casts(["bf16"])),
    "renamed": RewriteOptions(selection=Selection(rename=("^=x.",))),
    "dropped": RewriteOptions(selection=Selection(drop=("count",))),
}


@pytest.mark.parametrize("how", REWRITES)
def test_what_is_rewritten_on_the_way_is_compared_as_it_is_written(
    how: str, source: Path, damaging: Callable[..., None]
) -> None:
    options = REWRITES[how]
    name = "x.a" if how == "renamed" else "a"
    whole = planned(source, "safetensors", rewrite=options)
    whole.run()
    shutil.rmtree(on_disk(whole))
    transfer = planned(source, "safetensors", rewrite=options)
    damaging(*first_byte(transfer, name), flip)
    with pytest.raises(NotVerified, match=rf"1 of \d tensors differ .*{name}: 1 of 240 elements"):
        transfer.run()


def test_a_tensor_that_is_not_written_is_missed(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = written_entries
    monkeypatch.setattr(
        written,
        "written_entries",
        lambda *words: {n: e for n, e in real(*words).items() if n != "b"},
    )
    with pytest.raises(NotVerified, match="1 tensor not written, first b"):
        planned(source, "dcp").run()


def test_of_tied_tensors_one_must_be_written(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.ones(4, 4)
    torch.save({"a": one, "b": one, "c": torch.ones(3)}, out / "source.pt")
    real = written_entries
    for lost in ("a", "b", "ab"):
        monkeypatch.setattr(
            written,
            "written_entries",
            lambda *words, lost=lost: {n: e for n, e in real(*words).items() if n not in lost},
        )
        transfer = planned(out / "source.pt", "torch-save")
        if real(transfer.plan.layout, transfer.plan.catalog.tensors).keys() <= {*lost, "c"}:
            with pytest.raises(NotVerified, match="2 tensors not written, first a"):
                transfer.run()
        else:
            transfer.run()
            on_disk(transfer).unlink()


def test_without_proof_it_is_taken_as_it_is(source: Path, damaging: Callable[..., None]) -> None:
    transfer = planned(source, "safetensors", verify=False)
    damaging(*first_byte(transfer, "a"), flip)
    assert not transfer.run().verify
    assert transfer.target.exists()


def test_progress_ends_with_all_that_is_moved_and_read(source: Path) -> None:
    for rewrite in (RewriteOptions(), REWRITES["cast"]):
        transfer = planned(source, "torch-save", rewrite=rewrite)
        progress = Progress()
        transfer.run(progress)
        assert transfer.nbytes == progress.total == progress.done
        on_disk(transfer).unlink()


@pytest.mark.parametrize("to", TARGETS)
def test_numbers_that_a_cast_makes_infinite_are_reported(to: str, out: Path) -> None:
    """Those that are infinite already are no news; a tensor of two chunks is counted once."""
    infinite = float("inf")
    mask = torch.tensor([[0.0, -infinite, 65504.0, 1e30], [-7e4, float("nan"), 1.0, infinite]])
    torch.save({"mask": mask, "big": torch.full((3,), 1e38), "a": torch.ones(2)}, out / "source.pt")
    casts = RewriteOptions(casts=parse_casts(["*=fp16"]))
    report = planned(out / "source.pt", to, rewrite=casts).run()
    assert [note for note in report.notes if "infinite" in note] == [
        "5 values of 2 tensors (big, mask) became infinite in float16: finite before, beyond its"
        " range; --dtype bf16 keeps them finite"
    ]
    (out / TARGETS[to]).rename(out / "first")
    report = planned(out / "source.pt", to, rewrite=casts, verify=False).run()
    uncounted = "--no-verify: values beyond the range of float16 become infinite uncounted"
    assert uncounted in report.notes
    coarse = RewriteOptions(casts=parse_casts(["*=float8_e4m3fn"]))
    (out / TARGETS[to]).rename(out / "third")
    report = planned(out / "source.pt", to, rewrite=coarse).run()
    lost = "8 values of 2 tensors (big, mask) became its largest in float8_e4m3fn: beyond its range"
    assert any(note.startswith(lost) for note in report.notes)
    wide = RewriteOptions(casts=parse_casts(["*=fp64"]))
    (out / TARGETS[to]).rename(out / "second")
    report = planned(out / "source.pt", to, rewrite=wide, verify=False).run()
    assert not [note for note in report.notes if "infinite" in note]


def test_output_that_is_read_back_otherwise_once_is_not_the_sources_change(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = planned(source, "safetensors")
    real, left = LocalReader.read_into, 1

    def read_into(self: LocalReader, file: str, offset: int, buffer: memoryview) -> None:
        nonlocal left
        real(self, file, offset, buffer)
        if left and file.endswith(".safetensors") and len(buffer) > 500:
            left, buffer[-1] = 0, buffer[-1] ^ 1

    monkeypatch.setattr(LocalReader, "read_into", read_into)
    with pytest.raises(NotVerified, match=r"cannot be read back: .*\.safetensors: it was changed"):
        transfer.run()
    assert not left


def test_a_file_is_read_back_from_its_first_byte_to_its_last(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source has ``w2`` before ``w10``, the output after it."""
    torch.save({f"w{n}": torch.full((1 << 20,), n) for n in range(12)}, out / "source.pt")
    reads: list[tuple[bool, int]] = []
    real = LocalReader.read_some

    def read_some(self: LocalReader, file: str, offset: int, buffer: memoryview) -> int:
        reads.append((file.endswith(".safetensors"), offset))
        return real(self, file, offset, buffer)

    monkeypatch.setattr(LocalReader, "read_some", read_some)
    convert_to("safetensors", out / "source.pt", out / "m", run=RunOptions(workers=1, fsync=False))
    offsets = [offset for is_output, offset in reads if is_output and offset]  # but its header
    assert len(offsets) > 12
    assert offsets == sorted(offsets)
