"""Commands that write, killed and failed by strace at every system call that changes a disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

from fault_runs import Call, Ended, be_child, ended

CHANGING = (
    "openat,open,creat,write,writev,pwrite64,pwritev,pwritev2,copy_file_range,sendfile,splice,"
    "fallocate,ftruncate,truncate,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,"
    "mknod,mknodat,fsync,fdatasync,sync_file_range,link,linkat,symlink,symlinkat,chmod,fchmod,"
    "fchmodat,utimensat"
)
"""What changes a file system; the opens only where they make, empty or write a file."""
_OPENS = re.compile(r"O_(CREAT|WRONLY|RDWR|TRUNC|APPEND)")
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)")


def require_strace() -> str | None:
    """Why the calls cannot be traced here; None if they can."""
    if shutil.which("strace") is None:
        return "strace is missing: apt-get install strace"
    done = subprocess.run(["strace", "-qq", "true"], capture_output=True, text=True)
    return f"strace cannot trace here: {done.stderr.strip()}" if done.returncode else None


def run_traced(
    words: list[str],
    log: Path,
    place: Path,
    fault: str | None = None,
    call: Call | None = None,
    always: tuple[str, ...] = (),
) -> Ended:
    """Run a command in a process of its own; ``fault`` befalls its ``call``.

    ``fault`` is KILL, or an error's name, with a ``+`` where each further call of the kind fails
    too; ``always`` are further injections, as strace reads them.
    """
    trace = log.with_suffix(".trace")
    trace.unlink(missing_ok=True)
    log.write_text("")
    ready, go = os.pipe()
    stream = os.open(log, os.O_WRONLY)  # here, where no call is counted or meets a fault
    process = os.fork()
    if process == 0:
        os.read(ready, 1)
        be_child(words, stream)
    os.close(stream)
    line = ["strace", "-f", "-y", "-qq", "-s", "4096", "-o", str(trace), "-p", str(process)]
    line += ["-e", f"trace={CHANGING}"]
    injected = list(always)
    if fault is not None and call is not None:
        what = "signal=SIGKILL" if fault == "KILL" else f"error={fault.rstrip('+')}"
        more = "+" if fault.endswith("+") else ""
        injected.append(f"{call.name}:{what}:when={call.number}{more}")
    line += [word for one in injected for word in ("-e", f"inject={one}")]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as tracer:
        while "TracerPid:\t0" in Path(f"/proc/{process}/status").read_text():
            if tracer.poll() is not None:
                os.kill(process, 9)
                break
            time.sleep(0.001)
        os.write(go, b"x")
        os.close(go)
        os.close(ready)
        _, status = os.waitpid(process, 0)
    found = ended(status, log, _calls(trace, place))
    lines = trace.read_text(errors="replace").splitlines()
    strays = [line for line in lines if "(INJECTED)" in line and f"{place}" not in line]
    found.elsewhere = bool(strays)
    return found


def _calls(trace: Path, place: Path) -> list[Call]:
    """The calls below a folder, by their number among those of their name in one thread."""
    numbers: Counter[tuple[str, str]] = Counter()
    found: dict[Call, None] = {}
    for line in trace.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        thread, name, rest = match.groups()
        numbers[thread, name] += 1
        changes = not name.startswith("open") or _OPENS.search(rest)
        if changes and f"{place}" in rest:
            found[Call(name, numbers[thread, name])] = None
    return list(found)
