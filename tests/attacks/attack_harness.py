"""Run an attack in a forked child with bounded time and memory, and judge how it ended.

Whatever a source contains, opening and converting it must end in a ``CkptoolError`` or in a correct
result. Each attack runs open -> prepare -> run; the child reports one ``Outcome``.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory

import attack_build as b

from ckptool.commands.convert import prepare
from ckptool.commands.inspect.report import inspect
from ckptool.commands.inspect.views import inspect_json
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, TransferOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.codes import Severity
from ckptool.commands.verify.verify import verify
from ckptool.errors import CkptoolError, TransferError

MEMORY = 1 << 30
"""Bytes by which the address space may grow."""
SECONDS = 30.0 if "COVERAGE_RUN" in os.environ else 10.0
"""Seconds of processor time, so that a busy machine makes no difference.

With coverage measured, everything takes up to three times as long.
"""
ASLEEP = 20
"""Times as long by the clock: a process that has not used its seconds by then is waiting."""

VERIFY = "verify"
"""Instead of a target: verify the source."""
TARGETS = ("safetensors", "torch-save", "dcp")

CANARY = "ckptool_attack_canary"
"""A module that leaves a file behind when anything imports it or calls ``touch``."""


@dataclass(frozen=True)
class Outcome:
    """``kind``: ``ok``, ``error`` (a CkptoolError), ``crash``, ``hang``, ``killed``, ``left``.

    Of a verification it is ``reported`` where something above information was found; ``message``
    holds the codes.
    """

    kind: str
    error: str = ""
    exit_code: int = 0
    message: str = ""
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether it ended as documented: a result, or an error with an exit code."""
        return self.kind in ("ok", "reported") or (
            self.kind == "error" and self.exit_code in (2, 3, 4, 5)
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.error} {self.exit_code}: {self.message[-1500:]}"


def attack(
    source: Path, *, to: Sequence[str] = TARGETS, seconds: float = SECONDS, from_: str | None = None
) -> Outcome:
    """Inspect ``source`` and convert it to each target; the worst of the outcomes."""
    outcomes = attack_all([source], to=to, seconds=seconds, from_=from_)
    return outcomes[0]


def attack_all(
    sources: Iterable[Path],
    *,
    to: Sequence[str] = TARGETS,
    seconds: float = SECONDS,
    from_: str | None = None,
    setup: Callable[[Path], None] = lambda path: None,
) -> list[Outcome]:
    """One outcome per source. A child that dies or hangs is replaced for the remaining sources."""
    outcomes: list[Outcome] = []
    for source in sources:
        setup(source)
        outcomes.append(_attack(source, to, seconds, from_))
    return outcomes


_children: dict[object, _Child] = {}
"""The one child that there is, by what it took over from this process."""


def _attack(source: Path, to: Sequence[str], seconds: float, from_: str | None) -> Outcome:
    place = (os.getcwd(), *sys.path)
    if place not in _children:
        for child in _children.values():
            child.end()
        _children.clear()
        _children[place] = _Child()
    outcome = _children[place].attack(source, to, seconds, from_)
    if outcome.kind in ("hang", "killed"):
        _children.pop(place).end()
    return outcome


class _Child:
    """A fork of this process in which one source after the other is attacked."""

    def __init__(self) -> None:
        _import_all()
        self._asked, asking = Pipe()
        self._process = os.fork()
        if not self._process:
            self._asked.close()
            _limit()
            _collect_between_sources()
            with suppress(EOFError):
                while True:
                    asking.send(_outcome(*asking.recv()))
                    gc.collect()
            os._exit(0)
        asking.close()

    def attack(self, source: Path, to: Sequence[str], seconds: float, from_: str | None) -> Outcome:
        """Let it attack a source; ``hang`` or ``killed`` where it does not come to an end."""
        self._asked.send((source, to, seconds, from_))
        if not self._asked.poll(ASLEEP * seconds):
            os.kill(self._process, signal.SIGKILL)
            return Outcome("hang", message=f"no end after {seconds} s")
        try:
            outcome: Outcome = self._asked.recv()
        except (EOFError, ConnectionResetError):
            return Outcome("killed", message="the process died")
        return outcome

    def end(self) -> None:
        """Let it end, if it has not."""
        self._asked.close()
        os.waitpid(self._process, 0)


@cache
def _import_all() -> None:
    """Import what is attacked: each child would else do so for itself."""
    with TemporaryDirectory() as folder:
        source = Path(folder, "source", "model.safetensors")
        source.parent.mkdir()
        source.write_bytes(b.safetensors({"w": b.entry()}))
        for target in TARGETS:
            assert _convert(source, target, None).kind == "ok"
        assert _verify(source).kind == "ok"


def _collect_between_sources() -> None:
    """Collect no garbage while a source is attacked, as the command line does.

    What the test process held before the fork is never looked at.
    """
    gc.disable()
    gc.freeze()


def _limit() -> None:
    with open("/proc/self/statm") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Timeout(BaseException):
    pass


def _outcome(source: Path, to: Sequence[str], seconds: float, from_: str | None) -> Outcome:
    def too_late(*_: object) -> None:
        raise _Timeout

    signal.signal(signal.SIGPROF, too_late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        result = Outcome("ok")
        for target in to:
            before = result
            result = _verify(source) if target == VERIFY else _convert(source, target, from_)
            if result.kind not in ("ok", "reported", "error"):
                break
            if result.exit_code == 3 and result == before:  # what was read is refused, twice
                break
        return result
    except _Timeout:
        return Outcome("hang", message="".join(traceback.format_exc(limit=-6)))
    except BaseException:
        return Outcome("crash", message="".join(traceback.format_exc(limit=-6)))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _verify(source: Path) -> Outcome:
    try:
        report = verify(source, VerifyOptions(workers=1))
        json.dumps(report.to_dict(), allow_nan=False)
    except CkptoolError as error:
        return Outcome("error", type(error).__name__, error.exit_code, str(error))
    found = sorted({f.code for f in report.findings if f.severity is not Severity.INFO})
    return Outcome("reported" if found else "ok", message=" ".join(found))


def _convert(source: Path, to: str, from_: str | None) -> Outcome:
    name = "out.safetensors" if to == "safetensors" else "out.pt" if to == "torch-save" else "out"
    target = _outside(source) / name
    before = sorted(os.listdir(target.parent))
    options = ConvertOptions(
        to=to,
        read=ReadOptions(from_),
        transfer=TransferOptions(run=RunOptions(workers=1, budget=1 << 28, fsync=False)),
    )
    try:
        if to == TARGETS[0]:
            report = inspect(source, options.read)
            json.dumps(inspect_json(report), allow_nan=False)
        prepared = prepare(source, target, options)
        prepared.run()
    except CkptoolError as error:
        after = sorted(os.listdir(target.parent))
        if after != before and not isinstance(error, TransferError):
            return Outcome("left", message=f"{sorted(set(after) - set(before))} after {error}")
        str(error).encode("utf-8", "surrogateescape")
        return Outcome("error", type(error).__name__, error.exit_code, str(error))
    found = _written(target) if to == "safetensors" else {}
    outcome = Outcome("ok", tensors=found, message="; ".join(prepared.report.notes))
    _remove(target.parent)
    return outcome


def _outside(source: Path) -> Path:
    folder = source.parent.with_name(source.parent.name + ".target")
    folder.mkdir(exist_ok=True)
    _remove(folder)
    return folder


def _remove(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _written(target: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (dtype, shape, bytes) of the safetensors file that was written."""
    data = target.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        found[name] = (entry["dtype"], shape, data[8 + length + begin : 8 + length + end])
    return found


def place_canary(folder: Path) -> Path:
    """Put the canary module on ``sys.path``; returns the file that it would leave behind."""
    flag = folder / "EXECUTED"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{CANARY}.py").write_text(
        f"FLAG = {str(flag)!r}\n"
        "def touch(*args, **kw):\n    open(FLAG, 'w').close()\n    return {}\n"
        "class Touch(dict):\n"
        "    def __new__(cls, *a, **k):\n        touch()\n        return dict.__new__(cls)\n"
        "    def __setstate__(self, state):\n        touch()\n"
        "touch()\n"
    )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return flag
