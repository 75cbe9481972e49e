"""Which of the classes and functions that a pickle names could run code."""

from __future__ import annotations

from functools import lru_cache

from ckptool.serialization.pickle.numpy_records import is_numpy
from ckptool.serialization.pickle.records import Global

GETATTR = Global("builtins", "getattr")
"""Sound pickles name it, and call it with one pair of arguments; others can run code with it."""
SHARDED_MODULE = "torch.distributed._shard.sharded_tensor.api"
_SAFE_BUILTINS = frozenset(
    "set frozenset complex bytearray range slice int float str bytes list dict tuple bool"
    " object xrange long unicode Ellipsis NotImplemented".split()
)
"""Those of Python 3, and what protocol 2 calls ``range``, ``int`` and ``str``."""
_CODE_MODULES = frozenset(
    "IPython _ctypes _functools _operator _osx_support _pickle _posixsubprocess _socket"
    " _thread aiohttp asyncio atexit bdb cProfile cffi cgitb cloudpickle code codeop commands"
    " compileall concurrent ctypes curses dill distutils doctest ensurepip fabric fileinput"
    " ftplib functools gc getpass glob http idlelib imp importlib inspect lib2to3 linecache"
    " logging mailcap marshal mmap multiprocessing nt nturl2path numba operator os pandas"
    " paramiko pdb pexpect pickle pip pkgutil platform plumbum popen2 posix profile pty"
    " py_compile pydoc readline requests resource rlcompleter runpy sched setuptools sh shutil"
    " signal site smtplib socket sqlite3 ssl subprocess sys tarfile telnetlib tempfile"
    " threading timeit trace turtledemo types unittest urllib uuid venv webbrowser xmlrpc"
    " zipfile zipimport".split()
)
_CODE_GLOBALS = frozenset(
    [
        ("torch.hub", ""),
        ("torch.ops", ""),
        ("torch._ops", ""),
        ("torch.classes", ""),
        ("torch._classes", ""),
        ("torch.multiprocessing", ""),
        ("torch.utils.model_zoo", ""),
        ("torch.utils.data._utils", ""),
        ("torch.utils.data.datapipes", ""),
        ("torch.distributed.checkpoint.state_dict_loader", ""),
        ("torch.distributed.checkpoint.state_dict_saver", ""),
        ("torch.distributed.checkpoint.format_utils", ""),
        ("torch.utils.collect_env", ""),
        ("torch.utils.benchmark", ""),
        ("torch.utils.bottleneck", ""),
        ("torch.testing", ""),
        ("torch.distributed.elastic", ""),
        ("torch.distributed.launcher", ""),
        ("torch.distributed.run", ""),
        ("torch.jit", ""),
        ("torch.utils.cpp_extension", ""),
        ("torch.package", ""),
        ("torch.serialization", "load"),
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch.fx.graph_module", "reduce_graph_module"),
        ("numpy.testing", ""),
        ("numpy.f2py", ""),
        ("numpy", "load"),
        ("joblib", "load"),
        ("torch._dynamo.guards", ""),
        ("torch.distributed.rpc", ""),
        ("torch._inductor", ""),
        ("_io", ""),
        ("io", "open"),
        ("io", "FileIO"),
        ("io", "open_code"),
    ]
)


_INERT = frozenset(
    [
        ("_io", "BytesIO"),
        ("io", "BytesIO"),
        ("signal", "Signals"),
        ("types", "SimpleNamespace"),
        ("functools", "partial"),
        ("uuid", "UUID"),
        ("uuid", "SafeUUID"),
    ]
)
"""Plain holders of data whose modules also hold what runs code.

Of Megatron-core's safe globals, and of the hyperparameters that Lightning saves. What a partial
would call is a global too, and judged by itself.
"""

_DOTTED = frozenset([Global(SHARDED_MODULE, "ShardedTensor.ProcessGroupState")])
"""Names with a dot that checkpoints really hold; any other walks from a class to what it hides."""


def can_run_code(item: Global) -> bool:
    """Whether calling this global could run code or touch the system."""
    if item.module in ("builtins", "__builtin__", "__builtins__"):
        return item.name not in _SAFE_BUILTINS and item.name != "getattr"
    if is_numpy(item):
        return False
    if ("." in item.name and item not in _DOTTED) or item.name.startswith("__"):
        return True
    if (item.module, item.name) in _INERT:
        return False
    return (item.module, item.name) in _CODE_GLOBALS or _is_code(item.module)


@lru_cache(maxsize=4096)
def _is_code(module: str) -> bool:
    """Whether all that a module holds could run code. Hostile pickles name one a million times."""
    steps = module.split(".")
    outer = (".".join(steps[:count]) for count in range(1, len(steps) + 1))
    return steps[0] in _CODE_MODULES or any((one, "") in _CODE_GLOBALS for one in outer)


def is_name(text: str) -> bool:
    """Whether a text can be the dotted name of a module, class or function."""
    return len(text) < 1000 and all(step.isidentifier() for step in text.split("."))
