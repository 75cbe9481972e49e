"""How to rewrite a checkpoint: what to keep, under which names, in which element types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.commands.options import CASTS, DIMS, FILE, METADATA, PLACE
from ckptool.commands.options.choices import dtype_names, expert_words, map_names
from ckptool.commands.options.declaration import FLAG, RARE, TEXTS, OptionSet, group, option
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.core.casts import Casts
    from ckptool.storage.url import Location

NAMES = "What to keep, under which names and as which types"
NAMED = "a name, a glob, or a whole part between dots"
"""The one way to name tensors and values, in all options."""


class Selection(OptionSet):
    """Which tensors and values to keep and how to rename them, in this order."""

    select: tuple[str, ...] = option(
        "--select",
        TEXTS,
        metavar="NAME",
        help=f"Keep only matching names: {NAMED} (repeatable).",
    )
    drop: tuple[str, ...] = option(
        "--drop", TEXTS, metavar="NAME", help="Exclude matching names (repeatable)."
    )
    model_only: bool = option(
        "--model-only", FLAG, help="Keep the model only, under its own names."
    )
    no_optimizer: bool = option(
        "--no-optimizer",
        FLAG,
        former="--drop-optimizer",
        help="Leave out the optimizer's state, and keep everything else.",
    )
    peft_adapter: bool = option(
        "--peft-adapter",
        FLAG,
        help="Keep a LoRA adapter only, under the names that PEFT saves, with an"
        " adapter_config.json from the recorded settings.",
        panel=RARE,
    )
    strip_prefix: str | None = option(
        "--strip-prefix", metavar="PREFIX", help="Remove PREFIX from the names."
    )
    rename: tuple[str, ...] = option(
        "--rename",
        TEXTS,
        metavar="REGEX=REPLACEMENT",
        help="Rename what matches (repeatable, in order).",
    )


class MapOptions(OptionSet):
    """Which key map to apply, and its parameters; ``inverse`` None means whichever way matches."""

    name: str | None = option(
        "--map",
        metavar="NAME|FILE",
        choices=map_names,
        help="Convert names and layout to another framework's: a built-in key map (`ckptool maps`"
        " lists them), a TOML file, or auto.",
    )
    dims: Mapping[str, int] = option(
        "--dim",
        DIMS,
        default={},
        metavar="NAME=SIZE",
        help="Size of a dim that the key map names (repeatable).",
        panel=RARE,
    )
    assets: Path | None = option(
        "--hf-assets",
        FILE,
        metavar="FOLDER",
        help="Take config.json (the key map reads dims there) and tokenizer files from FOLDER.",
    )
    inverse: bool | None = option(
        "--inverse/--no-inverse",
        FLAG,
        default=None,
        help="Apply the key map backwards, from its `to` names to its `from` names; default:"
        " whichever way the names fit.",
        panel=RARE,
    )
    experts: str | None = option(
        "--experts",
        metavar="HOW",
        choices=expert_words,
        help="Have experts as one tensor per layer (packed, as transformers 5 in memory and FSDP2"
        " do) or one per expert (separate, as files and vLLM do).",
        panel=RARE,
    )

    @property
    def is_asked(self) -> bool:
        """Whether a key map was requested."""
        return self.name is not None or self.experts is not None

    def require_asked(self) -> None:
        """Raise UsageError for parameters of a key map without one."""
        if self.name is None and (self.dims or self.inverse is not None):
            raise UsageError("--dim and --inverse require --map")


class MapCheckOptions(OptionSet):
    """What to check a key map against."""

    check: Location | None = option(
        "--check",
        PLACE,
        metavar="CKPT",
        help="List the tensors of this checkpoint's model that no rule of the map matches, and the"
        " rules that match no tensor, each with the closest candidate.",
    )


class RewriteOptions(OptionSet):
    """What to keep of a checkpoint, under which names and element types, in this order."""

    selection: Selection = group(Selection, NAMES)
    map: MapOptions = group(MapOptions, NAMES)
    casts: Casts | None = option(
        "--dtype",
        CASTS,
        choices=dtype_names,
        metavar="DTYPE|NAME=DTYPE",
        panel=NAMES,
        help="Cast the model's weights, e.g. to bf16; with a NAME, cast whatever matches"
        " (repeatable, first match wins). Integers and tensors without dims are never cast.",
    )
    dequantize: bool = option(
        "--dequantize",
        FLAG,
        panel=NAMES,
        help="Dequantize FP8, INT8, INT4, MXFP4, NVFP4, GPTQ, AWQ, bitsandbytes, torchao,"
        " ComfyUI, to bf16 or what --dtype says; refuse other kinds.",
    )
    metadata: Mapping[str, str] = option(
        "--metadata",
        METADATA,
        default={},
        metavar="KEY=TEXT",
        help="Set this in the __metadata__ of every safetensors file (repeatable).",
        panel=RARE,
    )
    drop_metadata: tuple[str, ...] = option(
        "--drop-metadata",
        TEXTS,
        metavar="KEY|GLOB",
        help="Leave out what the __metadata__ of safetensors files says under matching keys"
        " (repeatable); '*' is all.",
        panel=RARE,
    )
