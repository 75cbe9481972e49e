"""The inert pickle machine against python's own pickle."""

from __future__ import annotations

import collections
import functools
import io
import os
import pickle
import pickletools
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.errors import Damaged, Hostile, SourceError
from ckptool.serialization.pickle.load import _recent_globals, find_globals, read_pickle
from ckptool.serialization.pickle.records import Call, Global, OrderedMapping, Persistent
from ckptool.serialization.pickle.write import dump
from ckptool.serialization.state_dict.values import collect_foreign_globals

PROTOCOLS = range(6)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
)
SMALL = st.integers(-(2**63), 2**64 - 1)
KEYS = st.one_of(SMALL, st.text(), st.booleans(), st.tuples(SMALL, st.text()))
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.tuples(inner, inner),
        st.sets(SMALL | st.text(), max_size=3),
        st.frozensets(SMALL, max_size=3),
        st.binary().map(bytearray),
    ),
    max_leaves=12,
)


def read(data: bytes) -> Any:
    return read_pickle(data, what="test").value


def typed(value: Any) -> Any:
    """The value with its types, which ``==`` alone would not compare."""
    if isinstance(value, dict):
        return dict, [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    return type(value), value


@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_plain_data_of_every_protocol(value: Any, protocol: int) -> None:
    assert typed(read(pickle.dumps(value, protocol))) == typed(value)


@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_the_slow_pickler_of_python_writes_other_opcodes(value: Any, protocol: int) -> None:
    stream = io.BytesIO()
    pickle._Pickler(stream, protocol).dump(value)
    assert typed(read(stream.getvalue())) == typed(value)


@given(PLAIN)
def test_what_is_written_is_read_again(value: Any) -> None:
    data, _ = dump(value)
    assert typed(read(data)) == typed(value)
    assert typed(pickle.loads(data)) == typed(value)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_are_written_in_one_order(kind: Any) -> None:
    one, other = kind([0, 8]), kind([8, 0])
    assert list(one) != list(other)
    assert dump(one)[0] == dump(other)[0]
    assert pickle.loads(dump(one)[0]) == one


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_and_ordered(protocol: int) -> None:
    shared = [1]
    value = collections.OrderedDict([("b", shared), ("a", shared)])
    found = read(pickle.dumps(value, protocol))
    assert isinstance(found, OrderedMapping)
    assert list(found) == ["b", "a"]
    assert found["a"] is found["b"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_list_that_holds_itself(protocol: int) -> None:
    value: list[Any] = [1]
    value.append(value)
    found = read(pickle.dumps(value, protocol))
    assert found[1] is found


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_classes_become_inert_records(protocol: int) -> None:
    found = read(pickle.dumps(Point(3), protocol))
    assert isinstance(found, Call)
    assert found.fields == {"x": 3}
    assert any("Point" in name for name in collect_foreign_globals(found))


@pytest.mark.parametrize("protocol", [2, 4])
def test_inert_records_are_written_as_what_they_were(protocol: int) -> None:
    again = pickle.loads(dump(read(pickle.dumps(Point(3), protocol)))[0])
    assert isinstance(again, Point)
    assert again.x == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_pickle_names_is_remembered_as_it_is(protocol: int) -> None:
    data = pickle.dumps([Point(3), collections.OrderedDict(a=1), protocol], protocol)
    _recent_globals.clear()
    followed = find_globals(data)
    read(data)
    assert followed == find_globals(data)
    assert Global("collections", "OrderedDict") in followed
    find_globals(data).clear()
    assert followed == find_globals(data) == read_pickle(b"N." + data, what="p", start=2).globals


@pytest.mark.parametrize("end", [b"\xff", b"(."])
def test_what_a_broken_pickle_names_is_remembered_too(end: bytes) -> None:
    data = b"ccollections\nOrderedDict\n" + end + b"cos\nsystem\n."
    _recent_globals.clear()
    followed = find_globals(data)
    with pytest.raises(Damaged):
        read_pickle(data, what="p", judges=False)
    assert _recent_globals
    assert followed == find_globals(data) == {Global("collections", "OrderedDict"): 0}


@pytest.mark.parametrize("number", [1 << 64, -1 << 64, 1 << 70, -(10**300)])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda n: {n: 0},
        lambda n: {1, n},
        lambda n: frozenset([1, n]),
        lambda n: {(1, n): 0},
        lambda n: {((n, 1), "a"): 0},
    ],
    ids=["key", "set", "frozenset", "tuple", "tuple in a tuple"],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_integers_of_any_size_are_keys(
    wrap: Callable[[int], Any], number: int, protocol: int
) -> None:
    assert read(pickle.dumps(wrap(number), protocol)) == wrap(number)


def in_batches(begin: bytes, items: list[bytes], add: bytes) -> bytes:
    """A pickle as python writes it, without the dict or set: to make one of these takes seconds."""
    batches = (items[at : at + 1000] for at in range(0, len(items), 1000))
    return b"\x80\4" + begin + b"".join(b"(" + b"".join(some) + add for some in batches) + b"."


@pytest.mark.parametrize(
    "write",
    [
        lambda keys: in_batches(b"}", [key + b"N" for key in keys], b"u"),
        lambda keys: in_batches(b"\x8f", keys, b"\x90"),
        lambda keys: in_batches(b"]", [b"}" + key + b"K\0s" for key in keys], b"e"),
    ],
    ids=["dict", "set", "dicts"],
)
def test_integers_that_all_have_the_same_hash_cost_what_they_cost(
    write: Callable[[list[bytes]], bytes],
) -> None:
    alike = [n * ((1 << 61) - 1) for n in range(1, 20_000)]
    assert len({*map(hash, alike[:3])}) == 1
    keys = [pickle.dumps(number, 3)[2:-1] for number in alike]
    assert [*pickle.loads(write(keys[:1]))] in ([alike[0]], [{alike[0]: 0}])
    with pytest.raises(Damaged, match="too many values"):
        read(write(keys))


def test_no_more_is_remembered_than_of_some_pickles() -> None:
    for number in range(3000):
        read(pickle.dumps(number))
    assert len(_recent_globals) <= 1024


def test_persistent_ids() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            return ("storage", 1) if item == "s" else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump(["s", "t"])
    loaded = read_pickle(stream.getvalue(), what="test")
    assert isinstance(loaded.value, list)
    (first, _) = loaded.value
    assert isinstance(first, Persistent)
    assert first.value == ("storage", 1)
    assert [item.value for item in loaded.persistent] == [("storage", 1)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("function", [os.system, eval, exec, __import__, open, getattr, setattr])
def test_globals_that_run_code_are_refused(function: Any, protocol: int) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return function, ("x", "y")

    with pytest.raises(Hostile, match="nothing was called") as caught:
        read(pickle.dumps(Evil(), protocol))
    assert function.__name__ in caught.value.message


@pytest.mark.parametrize("module", ["subprocess", "torch.hub", "shutil", "builtins", "ctypes.util"])
def test_modules_that_run_code_are_refused(module: str) -> None:
    with pytest.raises(Hostile):
        read(f"c{module}\nrun\n.".encode())


@pytest.mark.parametrize("end", [b"", b"(", b"\xff"])
def test_what_follows_code_does_not_hide_it(end: bytes) -> None:
    with pytest.raises(Hostile):
        read(b"cos\nsystem\n(S'x'\ntR" + end)


class Spot:
    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


def shape_of(value: Any) -> Any:
    """Records by what they are, so that they can be compared."""
    if isinstance(value, Call):
        return str(value.function), shape_of(list(value.args)), shape_of(value.state)
    if isinstance(value, list | tuple):
        return type(value), [shape_of(item) for item in value]
    if isinstance(value, dict):
        return [(shape_of(key), shape_of(item)) for key, item in value.items()]
    return type(value), value


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=4), max_size=5), st.booleans())
def test_runs_of_opcodes_that_are_read_at_once_are_as_one_by_one(
    shapes: list[list[int]], repeated: bool
) -> None:
    torch = pytest.importorskip("torch")
    sizes = [torch.Size(shape) for shape in shapes] * (1 + repeated)
    spots = [Spot(offsets=size, more=(size, {"fqn": "w"})) for size in sizes]
    value = {"sizes": sizes, "spots": spots, "last": spots[:1]}
    fused, spelled = pickle.dumps(value, 4), pickletools.optimize(pickle.dumps(value, 2))
    assert shape_of(read(fused)) == shape_of(read(spelled))
    assert read(fused)["last"][:1] == [] or isinstance(read(fused)["last"][0], Call)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(b"\x80\x04(K\x01\x86\x94.", id="mark in a pair"),
        pytest.param(b"\x80\x04ctorch\nSize\n(K\x01\x86\x94\x85\x94R\x94.", id="mark in a size"),
        pytest.param(b"\x80\x04()\x81\x94}\x94(ub.", id="mark as a class"),
        pytest.param(b"\x80\x04K\x01\x86.", id="too few"),
        pytest.param(b"\x80\x04](0e.", id="mark that was dropped"),
    ],
)
def test_fused_opcodes_find_what_does_not_fit(program: bytes) -> None:
    with pytest.raises(Damaged):
        read(program)


@given(PLAIN, st.data())
def test_a_cut_pickle_is_damaged(value: Any, data: st.DataObject) -> None:
    whole = pickle.dumps(value, data.draw(st.sampled_from(PROTOCOLS)))
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(Damaged):
        read(whole[:length])


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_an_error_of_ours(data: bytes) -> None:
    with suppress(SourceError):
        read(data + b".")


@given(PLAIN, st.data())
def test_any_change_is_a_value_or_an_error_of_ours(value: Any, data: st.DataObject) -> None:
    changed = bytearray(pickle.dumps(value, data.draw(st.sampled_from(PROTOCOLS))))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(SourceError):
        read(bytes(changed))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"", "ends before"),
        (b"\x80\x06N.", "protocol 6"),
        (b"\xff.", "unknown opcode 0xff"),
        (b"a.", "stack"),
        (b"}]Ns.", "as a key"),
        (b"h\x07.", "memo 7"),
        (b"t.", "no mark"),
        (b"L" + b"1" * 4000 + b"L\n.", "an integer of 4,000 digits"),
        (b"I" + b"1" * 4000 + b"\n.", "an integer of 4,000 digits"),
    ],
)
def test_malformed_programs_say_why(program: bytes, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        read(program)


def test_a_global_is_only_a_name() -> None:
    assert read(b"\x80\x02cno.such.module\nThing\n.") == Global("no.such.module", "Thing")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        range(3),
        int,
        str,
        ...,
        collections.defaultdict(int, {"a": 1}),
        functools.partial(dict, a=1),
        uuid.UUID(int=3),
    ],
    ids=repr,
)
def test_harmless_python_is_never_hostile(value: Any, protocol: int) -> None:
    read(pickle.dumps({"value": value}, protocol))


def test_what_a_partial_would_call_is_judged() -> None:
    with pytest.raises(Hostile, match=r"os\.system|posix\.system"):
        read(pickle.dumps(functools.partial(os.system, "true")))


def test_plain_holders_of_data_are_inert_though_their_modules_can_run_code() -> None:
    held = read_pickle(pickle.dumps(io.BytesIO(b"state")), what="p").value
    assert isinstance(held, Call | Global)
    assert held.name == "_io.BytesIO"
    with pytest.raises(Hostile):
        read_pickle(b"c_io\nFileIO\n(S'f'\ntR.", what="p")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("make", [list, dict, lambda: {1}], ids=["list", "dict", "set"])
def test_as_many_small_containers_are_read_as_a_pickle_can_have(make: Any, protocol: int) -> None:
    value = [make() for _ in range(100_000)]
    assert read_pickle(pickle.dumps(value, protocol), what="x").value == value


def test_keys_that_are_tuples_are_read_by_the_thousand() -> None:
    value = {(number, f"layer.{number}", (number, -number)): number for number in range(20_000)}
    assert read(pickle.dumps([value, set(value)], 4)) == [value, set(value)]
