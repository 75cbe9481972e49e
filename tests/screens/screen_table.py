"""Which commands have their screens in ``golden/``, and how wide the terminal is.

A word is a checkpoint of ``fixtures``, one that ``recipes.damage`` has damaged, or made by a
function of ``scenes.py``; each screen has its own folder with those that it names.
"""

from __future__ import annotations

from typing import NamedTuple


class Screen(NamedTuple):
    """Commands that run one after the other, and the terminal's width; None for a pipe."""

    commands: tuple[str, ...]
    width: int | None = 80


def on_terminal(*commands: str, width: int = 80) -> Screen:
    """Return the screen of a terminal."""
    return Screen(commands, width)


def in_a_pipe(*commands: str) -> Screen:
    """Return what a pipe or a file is given, whose lines are as long as they need."""
    return Screen(commands, None)


INSPECT = {
    "inspect-mesh": on_terminal("inspect dcp_fsdp2_tp"),
    "inspect-mesh-60": on_terminal("inspect dcp_fsdp2_tp", width=60),
    "inspect-mesh-120": on_terminal("inspect dcp_fsdp2_tp", width=120),
    "inspect-mesh-pipe": in_a_pipe("inspect dcp_fsdp2_tp"),
    "inspect-layers": on_terminal("inspect llama_consolidated"),
    "inspect-element-types": on_terminal("inspect dcp_zoo"),
    "inspect-zero-3": on_terminal("inspect deepspeed_zero_3"),
    "inspect-megatron": on_terminal("inspect megatron_torch_dist"),
    "inspect-odd-kinds": on_terminal("inspect odd_kinds"),
    "inspect-views": on_terminal(
        "inspect dcp_fsdp2 --tensors '*weight' --sort size",
        "inspect dcp_fsdp2 --depth 2 --sort size",
        "inspect dcp_fsdp2_tp --rank-bytes",
        "inspect dcp_fsdp2_tp --mesh 2x4",
    ),
    "inspect-shards": on_terminal("inspect rank_strided --shards '*'"),
    "inspect-values": on_terminal("inspect zip_zoo --values"),
    "inspect-stats": on_terminal("inspect dcp_zoo --stats 'view.*'", width=120),
    "inspect-stats-80": on_terminal("inspect dcp_zoo --stats 'view.*'"),
    "inspect-stats-60": on_terminal("inspect dcp_zoo --stats 'view.*'", width=60),
    "inspect-markdown": in_a_pipe(
        "inspect dcp_fsdp2 --format markdown", "inspect run --format markdown"
    ),
    "inspect-run": on_terminal("inspect run"),
    "inspect-run-60": on_terminal("inspect run", width=60),
    "inspect-damaged": on_terminal("inspect truncated"),
    "inspect-refused": on_terminal(
        *("inspect no_metadata", "inspect shard_truncated", "inspect rank_lost"),
        *("inspect torchscript", "inspect orbax", "inspect notes", "inspect nowhere"),
    ),
    "inspect-mistyped": on_terminal(
        *("inspect dcp_base --tensorz w", "inspect dcp_base --tensors k_proj"),
        *("inspect dcp_base --shards plian", "inspect dcp_base --stats plian"),
        *("inspect dcp_base --format cvs", "inspect dcp_base --format csv --json"),
        *("inspect dcp_base --format csv --depth 1 --values", "inspect dcp_base --html"),
        *("inspect dcp_base --export page.html", "inspect page.html"),
    ),
    "inspect-json": in_a_pipe("inspect truncated --json"),
    "inspect-error-json": in_a_pipe(
        *("inspect nowhere --json", "inspect --bogus --json", "inspect dcp_base --shards q --json"),
        "inspect index_no_json --json",
    ),
}

CONVERT = {
    "convert-file": on_terminal(
        *("convert dcp_fsdp2_tp out.pt", "convert dcp_fsdp2_tp out.pt"),
        *("convert dcp_fsdp2_tp out.pt --overwrite", "inspect out.pt"),
    ),
    "convert-side-file": on_terminal(
        "convert dcp_fsdp2_tp out.safetensors", "convert dcp_fsdp2_tp out.safetensors"
    ),
    "convert-model": on_terminal("convert dcp_fsdp2_tp out --to hf --model-only --dtype bf16"),
    "convert-dry-run": on_terminal(
        "convert dcp_fsdp2_tp out --to hf --model-only --rename '^blocks=layers' --dry-run"
    ),
    "convert-map": on_terminal("convert llama_consolidated out --to hf --map auto"),
    "convert-map-dry-run": on_terminal(
        "convert llama_consolidated out --to hf --map meta-llama --dry-run"
    ),
    "convert-map-dry-run-120": on_terminal(
        "convert llama_consolidated out --to hf --map meta-llama --dry-run", width=120
    ),
    "convert-map-refused": on_terminal(
        "convert dcp_fsdp2 out.pt --map torchtitan-llama3",
        "convert dcp_fsdp2 out.pt --map torchtitan-llama",
        "convert dcp_fsdp2 out.pt --map auto",
    ),
    "convert-dequantized": on_terminal("convert torchao out --to hf --dequantize"),
    "convert-parts": on_terminal(
        "convert dcp_base out --to dcp --part 1/2",
        "convert dcp_base out --to dcp --finish",
        "convert dcp_base out --to dcp --part 2/2",
        "convert dcp_base out --to dcp --finish",
    ),
    "convert-damaged": on_terminal(
        *("convert truncated out.pt", "convert data_flipped out.pt", "convert chunk_gap out.pt"),
        *("convert file_lost out.pt", "convert indexed_file_lost out.pt"),
    ),
    "convert-refused": on_terminal(
        "convert dcp_mismatch out.pt",
        "convert rank_differing out.pt",
        "convert odd_kinds out.safetensors",
    ),
    "convert-mistyped": on_terminal(
        *("convert dcp_base out", "convert dcp_base out --to safetensor", "convert dcp_base"),
        *("convert dcp_base out.pt --overwrit", "convert dcp_base out.pt --dtype bfloat61"),
        *("convert dcp_base out.pt --select 'x*'", "convert dcp_base out.pt --rename '^x='"),
        *("convert dcp_base out.pt --budget 1KiB", "convert dcp_base out.pt --part 3/2"),
    ),
}

RESHARD = {
    "reshard": on_terminal(
        "reshard dcp_fsdp2_tp out --mesh dp=4,tp=2 --workers 2 --dry-run",
        "reshard dcp_fsdp2_tp out --mesh dp=4,tp=2",
    ),
    "reshard-120": on_terminal(
        "reshard dcp_fsdp2_tp out --mesh dp=4,tp=2 --workers 2 --dry-run", width=120
    ),
    "reshard-rules": on_terminal(
        "reshard dcp_fsdp2 out --mesh 2x2 --shard '*.weight=colwise' --policy hsdp"
    ),
    "reshard-rank-files": on_terminal("reshard rank_fsdp1 out --mesh 4 --workers 2 --dry-run"),
    "reshard-bad-mesh": on_terminal(
        *(
            "reshard dcp_base out",
            "reshard dcp_base out --mesh 2x",
            "reshard dcp_base out --mesh 0",
        ),
        *("reshard dcp_base out --mesh 2x2x2x2x2", "reshard dcp_base out --mesh dp=2,dp=2"),
    ),
    "reshard-refused": on_terminal(
        "reshard dcp_base out --mesh 2x2 --shard 'w=Shard(3),Replicate()'",
        "reshard dcp_base out --mesh 2x2 --shard 'w=Shard(0)'",
        "reshard dcp_base out --mesh 2x2 --shard 'w=colwize'",
        "reshard dcp_base out --mesh 2x2 --shard 'x*=colwise'",
        "reshard dcp_base out --mesh 2x2 --policy fspd",
        "reshard dcp_base out --mesh 2x2 --to dpc",
        "reshard dcp_base out --mesh 2x2 --plan plan.toml",
        "reshard rank_differing out --mesh 2",
    ),
}

VERIFY = {
    "verify-good": on_terminal(
        *("verify dcp_base", "verify dcp_base --quick", "verify dcp_base --sample 50%"),
        "verify dcp_base --strict --quiet",
    ),
    "verify-damaged": on_terminal(
        *("verify truncated", "verify data_flipped", "verify data_flipped --quiet"),
        "verify no_metadata",
    ),
    "verify-stale-files": on_terminal("verify stale_files", "verify stale_files --strict"),
    "verify-ranks": on_terminal(
        "verify rank_lost", "verify rank_copied_over", "verify replicas_differ"
    ),
    "verify-shards": on_terminal(
        "verify shard_truncated", "verify indexed_file_lost", "verify total_size_wrong"
    ),
    "verify-odd-kinds": on_terminal("verify odd_kinds"),
    "verify-run": on_terminal(
        *("verify run --all", "verify run --latest-good", "verify run"),
        "verify run --against run",
    ),
    "verify-against": on_terminal(
        "verify dcp_fsdp2 --against dcp_fsdp2",
        "verify dcp_base --against data_flipped",
        "verify dcp_fsdp2 --against dcp_fsdp2_tp",
        "verify dcp_fsdp2 --against dcp_base",
    ),
    "verify-manifest": on_terminal(
        "verify hf_sharded --write-manifest good.json",
        "verify hf_sharded --manifest good.json",
        "verify shard_flipped --manifest good.json",
        "verify dcp_fsdp2 --manifest good.json",
    ),
    "verify-salvage": on_terminal("verify truncated --salvage out"),
    "verify-ci": in_a_pipe(
        "verify truncated --format junit",
        "verify data_flipped --format junit",
        "verify truncated --format github",
    ),
    "verify-codes": on_terminal("verify --codes"),
    "verify-mistyped": on_terminal(
        *("verify dcp_base --ignore crc-mismach", "verify dcp_base --format juint"),
        *("verify dcp_base --format 42", "verify dcp_base --format junit --json"),
        *("verify dcp_base --format junit --salvage out", "verify dcp_base --junit x.xml"),
        *("verify dcp_base --ranks",),
        *("verify dcp_base --from torch-svae", "verify dcp_base --sample 200%", "verify nowhere"),
        *("verify notes", "verify empty"),
    ),
}

OTHERS = {
    "diff-names": on_terminal("diff dcp_fsdp2 dcp_fsdp2_tp"),
    "diff-renamed": on_terminal("diff dcp_fsdp2 torch_2_4_dcp"),
    "diff-values": on_terminal(
        *("diff dcp_base items_swapped", "diff dcp_base items_swapped --values"),
        "diff dcp_base dcp_base --values",
    ),
    "extract-tensor": on_terminal(
        "extract dcp_fsdp2_tp model.embed.weight", "extract dcp_fsdp2_tp 'model.three[0:2,1]'"
    ),
    "extract-file": on_terminal(
        "extract dcp_fsdp2_tp '*bias' --out bias.safetensors",
        "extract dcp_fsdp2_tp '*bias' --out bias.safetensors",
    ),
    "extract-refused": on_terminal(
        "extract dcp_base plian",
        *("extract dcp_fsdp2_tp model.threee", "extract dcp_fsdp2_tp 'model.three[x]'"),
        *("extract dcp_fsdp2_tp 'model.three[5]'", "extract dcp_fsdp2_tp step"),
        *("extract dcp_fsdp2_tp '*bias' --out bias.bin", "extract truncated w"),
    ),
    "prune-dry-run": on_terminal("prune run --keep-last 2"),
    "prune": on_terminal("prune run --keep-last 1 --keep-every 200 --yes", "inspect run"),
    "prune-refused": on_terminal(
        *("prune run", "prune dcp_base --keep-last 1", "prune damaged_run --keep-last 1 --yes"),
        *("inspect damaged_run", "prune nowhere --keep-last 1"),
    ),
    "bench-refused": on_terminal(
        "bench --strategies torch-svae", "bench --size 4XB", "bench --ranks 0"
    ),
    "bench-help": on_terminal("bench --help"),
    "formats": on_terminal("formats"),
    "maps": on_terminal(
        "maps meta-lama",
        "maps meta-llama --check llama_consolidated",
        "maps torchtitan-llama3 --check dcp_fsdp2",
    ),
    "help": on_terminal(
        "--version", "help", "help sotres", "help inpsect", "help zzz", "help torchrun"
    ),
    "mistyped-commands": on_terminal(
        *("inpsect dcp_base", "verfy dcp_base", "dif dcp_base", "elsewhere", "formats --map"),
    ),
    "former-options": on_terminal(
        *("inspect dcp_base --map w", "inspect dcp_base --ranks", "convert a b --one-rank"),
        *("reshard dcp_base --unstack", "verify dcp_base --finite"),
        "verify dcp_base --against-from dcp",
    ),
    "help-options": on_terminal("--help"),
}

SCREENS = INSPECT | CONVERT | RESHARD | VERIFY | OTHERS
"""The screens by the names of their files."""
