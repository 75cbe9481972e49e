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
    CANARY,
    SECONDS,
    VERIFY,
    Outcome,
    attack,
    attack_all,
    place_canary,
)

COMMAND = "touch EXECUTED"


def run_system(function: bytes) -> bytes:
    return b.call(function, b.text(COMMAND))


def doubling(leaf: bytes, wrap: str, times: int) -> bytes:
    """A container that holds the one before twice, ``times`` deep: memory linear, reading 2**n."""
    body = leaf + b.put(1000)
    for step in range(1000, 1000 + times):
        two = b.get(step) + b.get(step)
        if wrap == "list":
            body += b"0](" + two + b"e"
        elif wrap == "tuple":
            body += b"0" + b.get(step) + b.get(step) + b"\x86"
        elif wrap == "dict":
            body += b"0}(" + b.text("a") + b.get(step) + b.text("b") + b.get(step) + b"u"
        elif wrap == "call":
            body += b"0" + b.glob("torch", "device") + b.get(step) + b.get(step) + b"\x86R"
        elif wrap == "newobj state":
            body += b"0" + b.glob("argparse", "Namespace") + b")\x81" + b.get(step)
            body += b.get(step) + b"\x86b"
        body += b.put(step + 1)
    return body


def repeated(body: bytes, times: int) -> bytes:
    """A list that holds what ``body`` makes, made again and again."""
    return b"](" + body * times + b"e"


# What names code: each must be refused as Hostile

HOSTILE: dict[str, bytes] = {
    "reduce": run_system(b.glob("os", "system")),
    "reduce posix": run_system(b.glob("posix", "system")),
    "python 2 builtin": b.call(b.glob("__builtin__", "eval"), b.text("open('EXECUTED', 'w')")),
    "builtins exec": b.call(b.glob("builtins", "exec"), b.text("open('EXECUTED', 'w')")),
    "builtins __import__": b.call(b.glob("builtins", "__import__"), b.text(CANARY)),
    "inst": b"(" + b.text(COMMAND) + b"ios\nsystem\n",
    "obj": b"(" + b.glob("os", "system") + b.text(COMMAND) + b"o",
    "newobj": b.glob("subprocess", "Popen") + b.tup(b.text(COMMAND)) + b"\x81",
    "newobj_ex": b.glob("subprocess", "Popen")
    + b.tup(b.text(COMMAND))
    + b.dct(shell=b"\x88")
    + b"\x92",
    "stack_global": run_system(b.stack_glob("os", "system")),
    "stack_global, names from the memo": b.text("os")
    + b.put(7)
    + b"0"
    + b.text("system")
    + b.put(8)
    + b"0"
    + b.get(7)
    + b.get(8)
    + b"\x93"
    + b.tup(b.text(COMMAND))
    + b"R",
    "stack_global, names as bytestrings": b"U\x02osU\x06system\x93" + b.tup(b.text(COMMAND)) + b"R",
    "global never called": b.glob("os", "system"),
    "global popped at once": b.glob("os", "system") + b"0N",
    "global as a dict key": b.pairs((b.glob("os", "system"), b.number(1))),
    "global below a mark": b"(" + b.glob("os", "system") + b"1N",
    "global in a persistent id": b.tup(
        b.text("storage"), b.glob("os", "system"), b.text("0"), b.text("cpu"), b.number(6)
    )
    + b"Q",
    "build state": b.new(b.glob("argparse", "Namespace"), b.dct(__reduce__=b.glob("os", "system"))),
    "getattr": b.call(b.glob("builtins", "getattr"), b.glob("torch", "Tensor"), b.text("__new__")),
    "getattr chain": b.call(
        b.call(b.glob("__builtin__", "getattr"), b.glob("torch", "serialization"), b.text("os")),
        b.text("system"),
    ),
    "getattr through inst": b"("
    + b.glob("torch", "serialization")
    + b.text("os")
    + b"i__builtin__\ngetattr\n",
    "getattr through obj": b"("
    + b.glob("builtins", "getattr")
    + b.glob("torch", "serialization")
    + b.text("os")
    + b"o",
    "getattr through newobj": b.glob("builtins", "getattr")
    + b.tup(b.glob("torch", "serialization"), b.text("os"))
    + b"\x81",
    "getattr of a lookalike pair": b.call(
        b.glob("builtins", "getattr"),
        b.glob("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
        b.text("__init__"),
    ),
    "dotted name": run_system(b.stack_glob("torch", "os.system")),
    "dotted name, sys.modules": b.stack_glob("torch", "sys.modules"),
    "dotted name, deep": run_system(b.stack_glob("torch.serialization", "pickle.loads")),
    "dotted name, allow-listed class": b.stack_glob(
        "collections", "OrderedDict.__init__.__globals__"
    ),
    "module re-exported by a safe one": run_system(b.stack_glob("pathlib", "os.system")),
    "submodule of a code module": b.glob("os.path", "join"),
    "torch's own shell": run_system(b.glob("torch.utils.collect_env", "run")),
    "torch.load": b.call(b.glob("torch", "load"), b.text("x.pt")),
    "torch storage from bytes": b.call(
        b.glob("torch.storage", "_load_from_bytes"), b.raw(b"cos\n")
    ),
    "torch benchmark timer": b.call(
        b.glob("torch.utils.benchmark", "Timer"), b.text("open('EXECUTED', 'w')")
    ),
    "functools.partial": b.call(b.glob("functools", "partial"), b.glob("builtins", "print")),
    "functools.reduce of code": b.call(b.glob("functools", "reduce"), b.glob("torch", "hub")),
    "operator.attrgetter": b.call(b.glob("operator", "attrgetter"), b.text("system")),
    "_operator.methodcaller": b.call(b.glob("_operator", "methodcaller"), b.text("system")),
    "timeit": b.call(b.glob("timeit", "timeit"), b.text("1")),
    "numpy.load": b.call(b.glob("numpy", "load"), b.text("x")),
    "logging.config": b.call(b.glob("logging.config", "dictConfig"), b.dct()),
    "zipfile": b.call(b.glob("zipfile", "ZipFile"), b.text("EXECUTED"), b.text("w")),
    "uuid's shell": b.call(b.glob("uuid", "_popen"), b.text("touch"), b.text("EXECUTED")),
    "pydoc.locate": b.call(b.glob("pydoc", "locate"), b.text(CANARY)),
    "ctypes": b.call(b.glob("ctypes", "CDLL"), b.text("libc.so.6")),
    "cffi": b.call(b.glob("cffi", "FFI")),
    "pandas": b.call(b.glob("pandas.io.pickle", "read_pickle"), b.text("x")),
    "unused after stop of a nested pickle": b.call(
        b.glob("pickle", "loads"), b.raw(b"cos\nsystem\n.")
    ),
}

# What names nothing dangerous that is known: kept as an inert record or refused, never called

UNKNOWN: dict[str, bytes] = {
    "canary class": b.call(b.glob(CANARY, "Touch")),
    "canary function": b.call(b.glob(CANARY, "touch")),
    "canary class, newobj": b.new(b.glob(CANARY, "Touch"), b.dct(a=b.number(1))),
    "canary __setstate__": b.new(b.glob(CANARY, "Touch"), b.tup(b"N", b.dct())),
    "canary by inst": b"(i" + f"{CANARY}\nTouch\n".encode(),
    "canary with items": b.glob(CANARY, "Touch") + b")\x81(" + b.number(1) + b.number(2) + b"e",
    "canary with entries": b.glob(CANARY, "Touch") + b")\x81(" + b.text("a") + b.number(2) + b"u",
    "canary as a dict key": b.pairs((b.call(b.glob(CANARY, "Touch")), b.number(1))),
    "canary in a set": b"\x8f(" + b.call(b.glob(CANARY, "Touch")) + b"\x90",
    "call of a call": b.call(b.call(b.glob(CANARY, "touch")), b.number(1)),
    "call of a text": b.call(b.text("os.system"), b.text(COMMAND)),
    "call of a number": b.call(b.number(3), b.text(COMMAND)),
    "call of a persistent id": b.call(b.storage(), b.text(COMMAND)),
    "newobj of a dict": b"})\x81",
    "newobj_ex with a text for keywords": b.glob(CANARY, "Touch") + b")" + b.text("k") + b"\x92",
    "module that does not exist": b.call(b.glob("no.such.module", "f")),
    "empty module": b.stack_glob("", "f"),
    "module with a space": b.stack_glob("os ", "system"),
    "module with NUL": b.stack_glob("os\0", "system"),
    "lone surrogate in a name": b.stack_glob("a\ud800", "b\udfff"),
}

# Allow-listed names with arguments their writer never gave them

ABUSE: dict[str, bytes] = {
    "OrderedDict of a number": b.call(b.glob("collections", "OrderedDict"), b.number(3)),
    "OrderedDict of odd pairs": b.call(b.glob("collections", "OrderedDict"), b.lst(b.tup(b"N"))),
    "OrderedDict of a text": b.call(b.glob("collections", "OrderedDict"), b.text("abcd")),
    "OrderedDict of a call": b.call(
        b.glob("collections", "OrderedDict"), b.call(b.glob("torch", "Size"), b")")
    ),
    "OrderedDict with a list as key": b.call(
        b.glob("collections", "OrderedDict"), b.lst(b.tup(b"]", b"N"))
    ),
    "OrderedDict state": b.call(b.glob("collections", "OrderedDict")) + b.number(1) + b"b",
    "encode rot13": b.call(b.glob("_codecs", "encode"), b.text("a"), b.text("rot13")),
    "encode zlib": b.call(b.glob("_codecs", "encode"), b.text("a"), b.text("zlib")),
    "encode without arguments": b.call(b.glob("_codecs", "encode")),
    "encode beyond latin1": b.call(b.glob("_codecs", "encode"), b.text("\u4e00"), b.text("latin1")),
    "bytearray of 10**12": b.call(b.glob("builtins", "bytearray"), b.number(10**12)),
    "bytearray of text in utf-32": b.call(
        b.glob("builtins", "bytearray"), b.text("a"), b.text("utf-32")
    ),
    "bytes of 10**12": b.call(b.glob("builtins", "bytes"), b.number(10**12)),
    "bytes of texts": b.call(b.glob("builtins", "bytes"), b.lst(b.text("a"))),
    "bytes of huge numbers": b.call(b.glob("builtins", "bytes"), b.lst(b.number(10**400))),
    "complex of text": b.call(b.glob("builtins", "complex"), b.text("x")),
    "complex of three": b.call(b.glob("builtins", "complex"), *[b.number(1)] * 3),
    "complex of a huge int": b.call(b.glob("__builtin__", "complex"), b.number(10**400), b"N"),
    "complex overflow": b.call(b.glob("__builtin__", "complex"), b.number(10**400)),
    "set of a number": b.call(b.glob("builtins", "set"), b.number(3)),
    "set of lists": b.call(b.glob("builtins", "set"), b.lst(b"]")),
    "frozenset of a call": b.call(b.glob("builtins", "frozenset"), b.call(b.glob("a", "b"))),
    "range of 10**12": b.call(b.glob("builtins", "range"), b.number(10**12)),
    "slice as a key": b.pairs((b.call(b.glob("builtins", "slice"), b.number(1)), b"N")),
    "rebuild_tensor without arguments": b.call(b.glob("torch._utils", "_rebuild_tensor_v2")),
    "rebuild_tensor of a text": b.tensor(b.text("storage")),
    "rebuild_tensor of another pid": b.tensor(b.tup(b.text("module"), b.text("0")) + b"Q"),
    "text persistent id": b.tensor(b"Pstorage\n"),
    "pid key is a list": b.tensor(b.storage(b.lst(b.number(0)))),
    "pid key is doubling": b.tensor(b.storage(doubling(b"]", "list", 40))),
    "pid key is nested": b.tensor(b.storage(b"]" * 30_000 + b"a" * 29_999)),
    "pid key is a huge int": b.tensor(b.storage(b.number(10**6000))),
    "pid without class": b.tensor(b.storage(cls=b.text("FloatStorage"))),
    "pid numel negative": b.tensor(b.storage(numel=b.number(-1))),
    "pid numel huge": b.tensor(b.storage(numel=b.number(10**6000))),
    "pid numel is text": b.tensor(b.storage(numel=b.text("6"))),
    "pid storage missing": b.tensor(b.storage(b.text("7"))),
    "shape is text": b.tensor(shape=b.text("23")),
    "shape negative": b.tensor(shape=b.tup(b.number(-2), b.number(3))),
    "shape negative and huge": b.tensor(shape=b.tup(b.number(-(10**6000)), b.number(3))),
    "shape beyond 64 bits": b.tensor(shape=b.tup(b.number(2**70), b.number(0))),
    "shape of 10**6000": b.tensor(shape=b.tup(b.number(10**6000), b.number(3))),
    "shape times strides overflows": b.tensor(
        shape=b.tup(b.number(2**62), b.number(2)), strides=b.tup(b.number(2**62), b.number(1))
    ),
    "shape doubling": b.tensor(shape=b.tup(doubling(b"]", "list", 40), b.number(3))),
    "shape nested": b.tensor(shape=b.tup(b"]" * 30_000 + b"a" * 29_999, b.number(3))),
    "shape is itself": b.tensor(shape=b"]" + b.put(900) + b.get(900) + b"a"),
    "shape of Size of Size": b.tensor(
        shape=b.call(b.glob("torch", "Size"), b.call(b.glob("torch", "Size"), b")"))
    ),
    "strides fewer than dims": b.tensor(strides=b.tup(b.number(1))),
    "strides more than dims": b.tensor(strides=b.tup(*[b.number(1)] * 3)),
    "strides negative": b.tensor(strides=b.tup(b.number(-3), b.number(1))),
    "strides leave the storage": b.tensor(strides=b.tup(b.number(4), b.number(2))),
    "offset leaves the storage": b.tensor(offset=b.number(1)),
    "offset negative": b.tensor(offset=b.number(-1)),
    "offset is a float": b.tensor(offset=b"G" + struct.pack(">d", 1.0)),
    "hundred dims": b.tensor(
        shape=b.tup(*[b.number(1)] * 100), strides=b.tup(*[b.number(1)] * 100)
    ),
    "v3 without dtype": b.call(b.glob("torch._utils", "_rebuild_tensor_v3"), *[b"N"] * 6),
    "v3 with a lie for dtype": b.call(
        b.glob("torch._utils", "_rebuild_tensor_v3"),
        b.storage(),
        b.number(0),
        b.tup(b.number(6)),
        b.tup(b.number(1)),
        b"\x89",
        b"N",
        doubling(b"]", "list", 40),
    ),
    "parameter of itself, 30,000 deep": b.glob("torch._utils", "_rebuild_parameter")
    + b.put(900)
    + b"0"
    + b.get(900) * 30_000
    + b.tensor()
    + b"\x85R" * 30_000,
    "type_v2 of itself, 30,000 deep": b"".join(
        [
            b.glob("torch._tensor", "_rebuild_from_type_v2"),
            b.put(900),
            b"0",
            b.glob("torch", "Tensor"),
            b.put(901),
            b"0",
            b"".join([b.get(900), b"(", b.get(900), b.get(901)]) * 20_000,
            b")",
            b"Nt" * 20_000,
        ]
    )
    + b"R",
    "type_v2 whose type is doubling": b.call(
        b.glob("torch._tensor", "_rebuild_from_type_v2"),
        b.glob("a", "b"),
        doubling(b"]", "list", 40),
        b")",
        b"N",
    ),
    "reconstruct whose type is doubling": b.call(
        b.glob("numpy._core.multiarray", "_reconstruct"), doubling(b"]", "list", 40)
    ),
    "conj of a list": b.tensor(extra=(b.lst(b.text("conj")),)),
    "dtype that is none": b.call(
        b.glob("torch._utils", "_rebuild_tensor_v3"),
        b.storage(),
        b.number(0),
        b.tup(b.number(6)),
        b.tup(b.number(1)),
        b"\x89",
        b"N",
        b.glob("torch", "nn"),
    ),
}

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
    "dcp value": (EACH, THREE),
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
    elif place in ("legacy", "dcp value"):
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
