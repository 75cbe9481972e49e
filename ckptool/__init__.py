"""ckptool: see, verify, convert and reshard distributed PyTorch checkpoints.

    checkpoint = ckptool.open(path)             # of any format, from its metadata alone
    checkpoint.read("w", (slice(0, 8),))        # any part of a tensor, only its bytes
    ckptool.load(path, model.state_dict())      # in place: each rank its own boxes
    ckptool.save(state, "model.safetensors")    # from memory, in every format that is written
    torch.distributed.checkpoint.load(state, storage_reader=ckptool.dcp.CheckpointReader(path))

The commands are functions too, with the same options as keywords, and return their reports:
``inspect``, ``stats``, ``diff``, ``extract``; ``convert``, ``reshard``, ``merge``; ``verify``,
``compare``, ``verify_run``, ``convert_run`` (of a run's steps), ``verify_merge`` and ``salvage``;
``bench`` and ``bench_changes``; ``list_formats``, ``list_maps``, ``list_steps`` (of a run) and
``map_text``. ``help`` of each lists its keywords. What goes wrong is a ``CkptoolError``, with a
``hint``. Each part is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptool.version import __version__

if TYPE_CHECKING:
    from ckptool import dcp as dcp
    from ckptool import errors as errors
    from ckptool.api.bench import bench as bench
    from ckptool.api.bench import bench_changes as bench_changes
    from ckptool.api.checkpoint import Checkpoint as Checkpoint
    from ckptool.api.checkpoint import open as open
    from ckptool.api.commands import compare as compare
    from ckptool.api.commands import convert as convert
    from ckptool.api.commands import convert_run as convert_run
    from ckptool.api.commands import diff as diff
    from ckptool.api.commands import extract as extract
    from ckptool.api.commands import inspect as inspect
    from ckptool.api.commands import list_formats as list_formats
    from ckptool.api.commands import list_maps as list_maps
    from ckptool.api.commands import list_steps as list_steps
    from ckptool.api.commands import map_text as map_text
    from ckptool.api.commands import prune as prune
    from ckptool.api.commands import reshard as reshard
    from ckptool.api.commands import salvage as salvage
    from ckptool.api.commands import stats as stats
    from ckptool.api.commands import verify as verify
    from ckptool.api.commands import verify_run as verify_run
    from ckptool.api.load import LoadReport as LoadReport
    from ckptool.api.load import load as load
    from ckptool.api.merge import merge as merge
    from ckptool.api.merge import verify_merge as verify_merge
    from ckptool.api.save import save as save
    from ckptool.api.state_dict import KeysDiffer as KeysDiffer
    from ckptool.core.box import Box as Box
    from ckptool.errors import CkptoolError as CkptoolError

_PLACES = {
    "api.bench": "bench bench_changes",
    "api.commands": "compare convert convert_run diff extract inspect list_formats list_maps"
    " list_steps map_text prune reshard salvage stats verify verify_run",
    "api.load": "LoadReport load",
    "api.merge": "merge verify_merge",
    "api.checkpoint": "Checkpoint open",
    "api.save": "save",
    "api.state_dict": "KeysDiffer",
    "core.box": "Box",
    "errors": "CkptoolError",
}
"""The public names, by the module that has them."""
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}

__all__ = [*_MODULES, "__version__", "dcp", "errors"]


if not TYPE_CHECKING:  # type checkers see the imports above and know no other name

    def __getattr__(name: str) -> Any:
        """Import a part when it is first used."""
        if name in ("dcp", "errors"):
            return import_module(f"ckptool.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'ckptool' has no attribute {name!r}")
        return getattr(import_module(f"ckptool.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
