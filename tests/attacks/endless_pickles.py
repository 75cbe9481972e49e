"""Pickles that are broken, endless, or larger than they look."""

from __future__ import annotations

import struct

import attack_build as b
from hostile_pickles import doubling


def repeated(body: bytes, times: int) -> bytes:
    """A list that holds what ``body`` makes, made again and again."""
    return b"](" + body * times + b"e"


# Programs that are broken, endless, or larger than they look

BOMBS: dict[str, bytes] = {
    "memo index 2**32-1": b.number(1) + b.put(0xFFFFFFFF),
    "text memo index 10**4000": b.number(1) + b"p" + b"9" * 4000 + b"\n",
    "memo never set": b.get(5),
    "memo of a mark": b"(" + b.put(5) + b"1" + b.get(5),
    "mark as a value": b"(",
    "mark duplicated": b"(2ll",
    "tuple over a mark": b"(" + b.number(1) + b"\x86",
    "pop below the bottom": b"000000",
    "append to a tuple": b")(" + b.number(1) + b"e",
    "setitem without value": b"}(" + b.number(1) + b"u",
    "additems to a list": b"](" + b.number(1) + b"\x90",
    "build on a list": b"]" + b.dct() + b"b",
    "two billion characters": b"X" + struct.pack("<I", 2**31) + b"a",
    "2**63 characters": b"\x8d" + struct.pack("<Q", 2**63) + b"a",
    "2**63 bytes": b"\x8e" + struct.pack("<Q", 2**63) + b"a",
    "bytearray8 of 2**62": b"\x96" + struct.pack("<Q", 2**62),
    "frame of 2**62": b"\x95" + struct.pack("<Q", 2**62) + b"N",
    "int of 20,000 digits as text": b"I" + b"9" * 20_000 + b"\n",
    "long of 20,000 bytes": b.number(1 << 160_000),
    "long of 20,000 bytes as key": b.pairs((b.number(1 << 160_000), b.tensor())),
    "negative long size": b"\x8b" + struct.pack("<i", -5),
    "float that is none": b"Fnan(0)\n",
    "string without quotes": b"Sabc\n",
    "string escape": b"S'\\x'\n",
    "unicode escape": b"V\\ud800\n",
    "invalid utf-8": b"X\x02\x00\x00\x00\xff\xfe",
    "extension 1": b"\x82\x01",
    "extension 2": b"\x83\x01\x00",
    "extension 4": b"\x84\x01\x00\x00\x00",
    "next buffer": b"\x97",
    "readonly buffer": b"N\x98",
    "protocol 6": b"\x80\x06N",
    "protocol in the middle": b"\x80\x02N",
    "unknown opcode": b"\xff",
    "stop inside": b"N.",
    "lists 30,000 deep": b"]" * 30_000 + b"a" * 29_999,
    "tuples 30,000 deep": b"N" + b"\x85" * 30_000,
    "dicts 30,000 deep": (b"}" + b.text("a")) * 30_000 + b"N" + b"s" * 30_000,
    "calls 30,000 deep": b.glob("torch", "device")
    + b.put(9)
    + b"0"
    + b.get(9) * 30_000
    + b"N"
    + b"\x85R" * 30_000,
    "states 30,000 deep": b.glob("argparse", "Namespace")
    + b.put(9)
    + b"0"
    + (b.get(9) + b")\x81") * 30_000
    + b"N"
    + b"b" * 30_000,
    "tuples deep as a key": b.pairs((b"N" + b"\x85" * 30_000, b"N")),
    "persistent ids 30,000 deep": b"N" + b"\x85Q" * 30_000,
    "frozensets 1,000 deep": b"(" * 1000 + b"\x91" * 1000,
    "list doubling": doubling(b"]", "list", 50),
    "list doubling, 200 deep": doubling(b"]", "list", 200),
    "tuple doubling": doubling(b")", "tuple", 50),
    "dict doubling": doubling(b"}", "dict", 50),
    "dict doubling over a list": doubling(b"]", "dict", 50),
    "call doubling": doubling(b.glob("torch", "device"), "call", 50),
    "state doubling": doubling(b"N", "newobj state", 50),
    "tuple doubling as a key": b.pairs((doubling(b")", "tuple", 50), b"N")),
    "wide tuple keys, four levels": b"}("
    + b"("
    + b"N" * 100
    + b"t"
    + b.put(1)
    + b"("
    + b.get(1) * 100
    + b"t"
    + b.put(2)
    + b"("
    + b.get(2) * 100
    + b"t"
    + b.put(3)
    + b"("
    + b.get(3) * 100
    + b"t"
    + b"Nu",
    "list that holds itself": b"]" + b.put(1) + b.get(1) + b"a",
    "list that holds itself twice": b"]" + b.put(1) + b"(" + b.get(1) * 2 + b"e",
    "dict that holds itself": b"}" + b.put(1) + b.text("a") + b.get(1) + b"s",
    "tuple in a list in the tuple": b"]"
    + b.put(1)
    + b"\x85"
    + b.put(2)
    + b"0"
    + b.get(1)
    + b.get(2)
    + b"a",
    "call whose state is itself": b.glob("argparse", "Namespace")
    + b")\x81"
    + b.put(1)
    + b.get(1)
    + b"b",
    "call whose state holds itself": b.glob("argparse", "Namespace")
    + b")\x81"
    + b.put(1)
    + b"}"
    + b.text("me")
    + b.get(1)
    + b"sb",
    "call that holds itself": b.glob("a", "b") + b")\x81" + b.put(1) + b.get(1) + b"a",
    "ordered dict that holds itself": b.call(b.glob("collections", "OrderedDict"))
    + b.put(1)
    + b.text("a")
    + b.get(1)
    + b"s",
    "ordered dict whose state is itself": b.call(b.glob("collections", "OrderedDict"))
    + b.put(1)
    + b.get(1)
    + b"b",
    "keys that collide": b"}("
    + b"".join(b.number(k * (2**61 - 1)) + b"N" for k in range(1, 30_000))
    + b"u",
    "bytes copied again and again": b.glob("_codecs", "encode")
    + b.put(1)
    + b"0"
    + b.tup(b.text("a" * 200_000), b.text("latin1"))
    + b.put(2)
    + b"0"
    + repeated(b.get(1) + b.get(2) + b"R", 20_000),
    "sets copied again and again": b.glob("builtins", "set")
    + b.put(1)
    + b"0"
    + b.tup(b.lst(*[b.number(i) for i in range(20_000)]))
    + b.put(2)
    + b"0"
    + repeated(b.get(1) + b.get(2) + b"R", 20_000),
    "one big list under 20,000 names": b.lst(*[b.number(i % 256) for i in range(50_000)])
    + b.put(1)
    + b"0}("
    + b"".join(b.text(str(i)) + b.get(1) for i in range(20_000))
    + b"u",
    "one big list in 20,000 lists": b.lst(*[b.number(i % 256) for i in range(50_000)])
    + b.put(1)
    + b"0}("
    + b"".join(b.text(str(i)) + b"]" + b.get(1) + b"a" for i in range(20_000))
    + b"u",
    "one tuple as 20,000 keys": b.tup(*[b.number(1)] * 9_900)
    + b.put(1)
    + b"0}("
    + (b.get(1) + b"N") * 20_000
    + b"u",
    "one tuple in 20,000 sets": b.tup(*[b.number(1)] * 9_900)
    + b.put(1)
    + b"0"
    + repeated(b"\x8f(" + b.get(1) + b"\x90", 20_000),
    "tuples that collide": b"}("
    + b"".join(
        b.tup(*[b"J" + struct.pack("<i", -1 - (k >> bit & 1)) for bit in range(15)]) + b"N"
        for k in range(1 << 15)
    )
    + b"u",
    "long text compared again and again": b.text("a" * 500_000)
    + b.put(1)
    + b"0"
    + b.text("a" * 500_000)
    + b.put(2)
    + b"0"
    + repeated(b"}(" + b.get(1) + b"N" + b.get(2) + b"Nu", 50_000),
    "one long name again and again": b.text(".".join(["a"] * 490))
    + b.put(1)
    + b"0"
    + repeated(b.get(1) * 2 + b"\x930N0", 100_000),
    "one big state in 20,000 records": b.glob("a", "b")
    + b.put(2)
    + b"0"
    + b"}("
    + b"".join(b.number(i) + b"N" for i in range(256))
    + b"u"
    + b.put(1)
    + b"0"
    + repeated(b.get(2) + b")\x81" + b.get(1) + b"b", 20_000),
}
