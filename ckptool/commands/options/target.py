"""How to write a checkpoint: in another format, or for another device mesh."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.commands.options import FILE, MESH, PART, SHARD_RULES
from ckptool.commands.options.choices import (
    mesh_target_names,
    policy_names,
    rank_state_words,
    target_names,
)
from ckptool.commands.options.declaration import (
    FLAG,
    RARE,
    SIZE,
    OptionSet,
    group,
    option,
)
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.run import RunOptions
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.core.mesh import Mesh
    from ckptool.core.sharding.placement import PlacementRule
    from ckptool.engine.share import Share

WRITING = "How to write DST"


OVERWRITE = option(
    "--overwrite", FLAG, help="Replace what exists at the target, once everything is written."
)


class TransferOptions(OptionSet):
    """How to write. ``dry_run`` is for the command: a transfer itself always writes."""

    overwrite: bool = OVERWRITE
    resume: bool = option(
        "--resume", FLAG, help="Continue the partial output of an interrupted run."
    )
    verify: bool = option(
        "--verify/--no-verify",
        FLAG,
        default=True,
        help="Read the output back and compare every tensor with SRC before committing.",
    )
    run: RunOptions = group(RunOptions)
    part: Share | None = option(
        "--part",
        PART,
        help="Write the K-th of N parts, without creating DST yet. Each can run in any process on"
        " any machine that sees SRC and DST; the same command continues it.",
        panel=RARE,
    )
    finish: bool = option(
        "--finish",
        FLAG,
        help="Once all parts are done, check them and put them in place.",
        panel=RARE,
    )
    dry_run: bool = option("--dry-run", FLAG, help="Show the plan; write nothing.")

    def is_shared(self, ranks: int) -> bool:
        """Return whether other processes write, or wrote, the rest; true of several ranks."""
        return (self.part is not None or self.finish or ranks > 1) and not self.dry_run

    def require_one_way(self) -> None:
        """Raise UsageError for options that cannot be combined."""
        if self.overwrite and self.resume:
            raise UsageError(
                "--overwrite and --resume: one at a time",
                hint="--resume continues an interrupted run, also one that was to overwrite;"
                " --overwrite starts over",
            )
        if self.part is not None and self.finish:
            raise UsageError(
                "--part and --finish: one at a time",
                hint="run each part with --part K/N, then once the same with --finish",
            )
        if self.resume and (self.part is not None or self.finish):
            which = "--finish" if self.finish else "--part"
            raise UsageError(
                f"--resume: {which} always continues what is there", hint="leave out --resume"
            )


MAX_SHARD_SIZE = option(
    "--max-shard-size",
    SIZE,
    default=5_000_000_000,
    shown="5GB",
    panel=WRITING,
    help="Start a new safetensors file beyond this size.",
)


class SaveOptions(OptionSet):
    """How to write a state from memory; ``to`` None means as the target's name says."""

    to: str | None = None
    max_shard_size: int = MAX_SHARD_SIZE
    transfer: TransferOptions = group(
        TransferOptions, without=("resume", "part", "finish", "dry_run")
    )


class ConvertOptions(OptionSet):
    """How to read a checkpoint, how to rewrite it, and how to write it.

    ``max_shard_size`` in bytes.
    """

    to: str | None = option(
        "--to",
        metavar="FORMAT",
        choices=target_names,
        help="Write safetensors (a .safetensors file, or else a Hugging Face folder: hf),"
        " torch-save, dcp, dcp-safetensors, diffusers, deepspeed-universal or"
        " megatron-torch_dist; default: what DST's suffix says, .safetensors or .pt, or for"
        " a folder what SRC is.",
    )
    read: ReadOptions = group(ReadOptions)
    rewrite: RewriteOptions = group(RewriteOptions)
    max_shard_size: int = MAX_SHARD_SIZE
    single_rank: bool = option(
        "--single-rank",
        FLAG,
        former="--one-rank",
        help="Write whole tensors as rank 0 instead of keeping the source's chunks.",
        panel=RARE,
    )
    transfer: TransferOptions = group(TransferOptions, WRITING)


_NOT_RESHARDED = (
    *("peft_adapter", "strip_prefix", "rename", "dequantize", "metadata", "drop_metadata"),
)


class ReshardOptions(OptionSet):
    """The mesh, what decides the placements, how to read and how to write.

    ``rank_state`` applies to state that differs between the source's ranks, whatever
    ``read.per_rank`` says. ``to`` None means the source's own kind.
    """

    mesh: Mesh | None = option(
        "--mesh", MESH, help="Write for this device mesh: 2x4, 8, or dp=2,tp=4."
    )
    rules: tuple[PlacementRule, ...] = option(
        "--shard",
        SHARD_RULES,
        help="Place what matches: Shard(0),Replicate() or colwise (repeatable, first match wins).",
    )
    policy: str | None = option(
        "--policy",
        metavar="NAME",
        choices=policy_names,
        help="Place everything else by fsdp, hsdp or replicate.",
    )
    plan_file: Path | None = option(
        "--plan", FILE, help="Read the mesh and ordered rules from a TOML file."
    )
    tp_plan: Path | None = option(
        "--tp-plan", FILE, help="Place by the transformers tp_plan of a config.json."
    )
    to: str | None = option(
        "--to",
        metavar="FORMAT",
        choices=mesh_target_names,
        help="Write dcp, accelerate (transformers' Trainer, too), verl, rank-local,"
        " torch-checkpointing, dcp-safetensors, sharded-state or llama; default: the source's own"
        " kind.",
    )
    read: ReadOptions = group(ReadOptions, without=("per_rank",))
    rank_state: str = option(
        "--rank-state",
        default="drop-rng",
        metavar="WHAT",
        choices=rank_state_words,
        help="What to do with state that differs between ranks: drop-rng (drop random number"
        " states and ranks' own numbers, refuse all else), drop, keep, stop (refuse), or the number"
        " of the rank to copy it from.",
    )
    rewrite: RewriteOptions = group(RewriteOptions, without=_NOT_RESHARDED)
    transfer: TransferOptions = group(TransferOptions, WRITING)
    check: bool = option(
        "--check",
        FLAG,
        help="Load the result through torch, on as many ranks as the mesh has, and compare.",
    )
