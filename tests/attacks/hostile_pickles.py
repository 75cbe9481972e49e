"""Pickles, by technique, that name code, what is unknown, or what is allowed with odd arguments."""

from __future__ import annotations

import struct

import attack_build as b
from attack_harness import (
    CANARY,
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
