"""Archives with a known layout: what is said of them is what reading them in full says."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import pytest
import torch
from attack_archives import FORGERIES, VALUE, archive, entry, plain, record
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.errors import CkptoolError
from ckptool.serialization.archive import templates
from ckptool.serialization.archive.templates import Hole, Sibling, Template, Templates
from ckptool.serialization.source import NearReads
from ckptool.serialization.zip import Region, ZipRecord, read_directory
from ckptool.serialization.zip_headers import check_headers, count_unclaimed_bytes


class Memory:
    """One file in memory, as a source."""

    root = "memory"

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.files = {"file": len(data)}

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]

    def narrowed(self, folder: str) -> Memory:
        raise NotImplementedError

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Announce nothing."""


def region_of(data: bytes) -> Region:
    return Region(NearReads(Memory(data)), "file", 0, len(data))  # type: ignore[arg-type]


@given(data=st.data())
def test_bytes_with_holes(data: st.DataObject) -> None:
    """Bytes match if they differ in holes, and in what is not compared, alone."""
    pieces = data.draw(st.lists(st.sampled_from(["same", "skipped", "text", "number"]), max_size=9))
    first, second, spans, texts, numbers = b"", b"", [], list[Hole](), list[Hole]()
    for piece in pieces:
        at = len(first)
        one, other = (data.draw(st.binary(min_size=4, max_size=4)) for _ in range(2))
        if piece == "text":
            texts.append(Hole(at, 4, "s"))
        elif piece == "number":
            numbers.append(Hole(at, 4, "L"))
        first += one
        second += one if piece == "same" else other
        if piece != "skipped":
            spans.append((at, at + 4))
    template = Template.of(first, spans, texts, numbers)
    values = (
        tuple(second[hole.at : hole.at + 4] for hole in texts),
        tuple(int.from_bytes(second[hole.at : hole.at + 4], "little") for hole in numbers),
    )
    assert template.match(second) == values
    assert template.match(second + b"0") is None
    if pieces:
        assert [*template.match_each(first + second)] == [template.match(first), values]
    for at in range(len(second)):
        changed = second[:at] + bytes([second[at] ^ 1]) + second[at + 1 :]
        assert (template.match(changed) is None) == (pieces[at // 4] == "same")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What torch saves of three ranks, under names of one length, with a pickle of over 1 KiB."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(3):
        state = {f"layer.{at}": torch.full((40 + at,), float(rank + at)) for at in range(20)}
        torch.save({**state, "rank": rank}, folder / f"rank_{rank}.pt")
    return [(folder / f"rank_{rank}.pt").read_bytes() for rank in range(3)]


def learn(*contents: bytes) -> Templates:
    """Return what is learned of archives."""
    known = Templates()
    for data in contents:
        region = region_of(data)
        known.learn(region, read_directory(region).values())
    return known


def is_learned(data: bytes) -> bool:
    """Return whether others can be judged by an archive."""
    return learn(data).find(region_of(data)) is not None


def records_of(sibling: Sibling) -> dict[str, ZipRecord]:
    """Return all records of an archive that matches a template."""
    records = map(sibling.record, range(len(sibling.template.records)))
    return {record.name: record for record in records}


def read_in_full(data: bytes) -> dict[str, ZipRecord] | None:
    """Return the records of an archive; None if anything is wrong with it but storages."""
    region = region_of(data)
    try:
        records = read_directory(region)
        odd = check_headers(region, records.values())
        unused = count_unclaimed_bytes(region, records.values())
    except CkptoolError:
        return None
    own = (".pkl", "serialization_id")
    compared = [r for r in records.values() if not r.is_storage and not r.name.endswith(own)]
    differs = any(zlib.crc32(region.read(r.offset, r.stored)) != r.crc32 for r in compared)
    return None if odd or unused or differs else records


def test_archives_of_other_ranks(archives: list[bytes]) -> None:
    first, *others = archives
    known = learn(first)
    for data in others:
        sibling = known.find(region_of(data))
        assert sibling is not None
        assert records_of(sibling) == read_in_full(data)
        records = records_of(sibling)
        own = [record for record in records.values() if not templates.is_compared(record)]
        assert sibling.own_records(storages=True) == own
        assert sibling.own_records(storages=False) == [r for r in own if not r.is_storage]
        storages = {r.name.rpartition("/")[2]: r for r in own if r.is_storage}
        numbers = sibling.template.storages.items()
        assert {key: sibling.record(at) for key, at in numbers} == storages
        assert sibling.has_sums


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damaged_archives(archives: list[bytes], data: st.DataObject) -> None:
    """Whatever is changed: an archive is judged by the layout of another one, or not at all."""
    known = learn(archives[0])
    changed = bytearray(archives[1])
    records = [*read_directory(region_of(archives[1])).values()]
    for _ in range(data.draw(st.integers(1, 3))):
        record = data.draw(st.sampled_from(records))
        behind = record.offset + record.stored
        near = [record.header, record.noted - 16, behind, len(changed) - 98]
        at = data.draw(st.sampled_from(near)) + data.draw(st.integers(0, 97))
        changed[min(at, len(changed) - 1)] = data.draw(st.integers(0, 255))
    sibling = known.find(region_of(bytes(changed)))
    if sibling is not None:
        assert records_of(sibling) == read_in_full(bytes(changed))


@pytest.mark.parametrize("root", ["rank/1", "rank_\x80", "rank_9"])
def test_other_names_of_the_root(archives: list[bytes], root: str) -> None:
    known = learn(archives[0])
    changed = archives[1].replace(b"rank_1/", root.encode("latin1") + b"/")
    sibling = known.find(region_of(changed))
    assert (sibling is not None) == (root == "rank_9")
    if sibling is not None:
        assert records_of(sibling) == read_in_full(changed)


def test_archives_that_others_are_not_judged_by(archives: list[bytes]) -> None:
    """A damaged header, a sum that is stated twice otherwise, a record with another content."""
    records = read_directory(region_of(archives[0]))
    storage, version = records["rank_0/data/3"], records["rank_0/version"]
    behind = storage.offset + storage.stored
    for at in (storage.header + 6, storage.noted, behind + 4, behind + 8, version.offset):
        changed = bytearray(archives[0])
        changed[at] ^= 1
        assert read_in_full(bytes(changed)) is None
        assert not is_learned(bytes(changed))
    assert is_learned(archives[0])


@pytest.mark.parametrize("forged", FORGERIES)
def test_forged_archives_that_others_are_not_judged_by(
    forged: Callable[[], tuple[bytes, bytes]],
) -> None:
    first, second = forged()
    assert read_in_full(first)
    assert not read_in_full(second)
    assert learn(first).find(region_of(second)) is None
    assert learn(plain(b"one")).find(region_of(plain(b"two")))


def test_an_archive_without_any_storage() -> None:
    pickle = "archive/data.pkl"
    assert not is_learned(archive(record(pickle, VALUE), [entry(pickle, VALUE, 0)]))


def test_how_much_is_learned(archives: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than some sizes, some archives of each, and some records of all."""
    one, two = archives[0], plain(b"one")
    nrecords = len(read_directory(region_of(one)))
    for limit, least in (("_MOST_SIZES", 1), ("_MOST_OF_A_SIZE", 1), ("_MOST_RECORDS", nrecords)):
        with monkeypatch.context() as patch:
            patch.setattr(templates, limit, least)
            known = learn(one, one, two)
            assert known.find(region_of(one))
            assert bool(known.find(region_of(two))) == (limit == "_MOST_OF_A_SIZE")
            patch.setattr(templates, limit, 0)
            assert not learn(one).find(region_of(one))


def test_a_record_that_is_in_no_folder() -> None:
    """It has the name of the root, and no other."""
    records = [("archive/data.pkl", VALUE), ("archive", bytes(2000)), ("archive/data/0", b"one")]
    body, entries = b"", []
    for name, content in records:
        entries.append(entry(name, content, len(body)))
        body += record(name, content)
    assert read_in_full(archive(body, entries))
    assert not is_learned(archive(body, entries))


def test_a_root_of_many_characters() -> None:
    assert is_learned(plain(b"one", root="r" * 255))
    assert not is_learned(plain(b"one", root="r" * 256))


def test_an_archive_of_which_both_ends_are_known() -> None:
    """A packed item is unpacked to them: what is between must be the content of a storage."""
    one, two = (plain(bytes([value]) * 10_000) for value in (1, 2))

    def packed(data: bytes, nbytes: int) -> Region:
        return Region(None, "file", 0, len(data), (data[:nbytes], data[-nbytes:]))

    known = learn(one)
    assert known.find(packed(two, 2048)) == known.find(region_of(two))
    assert known.find(packed(two, 60)) is None
