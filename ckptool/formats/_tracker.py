"""The file in which a run says which of its checkpoints is the latest."""

from __future__ import annotations

from ckptool.errors import Damaged
from ckptool.formats.base import Source

MEGATRON = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_LONGEST = 64


def latest_folder(source: Source) -> str | None:
    """The subfolder that a run's tracker file names; None where there is no tracker.

    Megatron-LM's holds an iteration (``iter_0000100``) or ``release``; ByteCheckpoint and verl
    write the same file beside ``global_step_100``. Damaged where the folder it names is not there.
    """
    size = source.files.get(MEGATRON)
    if size is None or size > _LONGEST:
        return None
    text = source.read(MEGATRON, 0, size).decode("ascii", "replace").strip()
    if text != RELEASE and not text.isdecimal():
        return None
    names = [text] if text == RELEASE else [f"iter_{int(text):07d}", f"global_step_{int(text)}"]
    folders = {file.partition("/")[0] for file in source.files if "/" in file}
    found = next((name for name in names if name in folders), None)
    if found is None:
        raise Damaged(
            f"{source.root}: {MEGATRON} says {text!r}, and there is no {' or '.join(names)}",
            hint="name a folder that is there; it may be older",
        )
    return found
