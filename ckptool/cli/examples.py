"""What ``--help`` shows besides options: groups of commands, and examples for each."""

from __future__ import annotations

GROUPS = {
    "Look": ("inspect", "diff", "extract"),
    "Change": ("convert", "reshard", "merge"),
    "Verify and clean up": ("verify", "prune"),
    "Measure": ("bench",),
    "Reference": ("formats", "maps", "help"),
}
"""The panels of ``ckptool --help``."""

EXAMPLES = {
    "inspect": (
        "ckptool runs/step-1000",
        "ckptool inspect runs/",
        "ckptool inspect runs/step-1000 --depth 3 --sort size",
        "ckptool inspect runs/step-1000 --tensors q_proj --json",
    ),
    "diff": (
        "ckptool diff runs/step-1000 model/config.json",
        "ckptool diff runs/step-1000 runs/step-2000 --values",
    ),
    "extract": (
        "ckptool extract runs/step-1000 'model.embed.weight[0:4, :8]'",
        "ckptool extract runs/step-1000 '*.wq.weight' --out wq.safetensors",
    ),
    "convert": (
        "ckptool convert runs/step-1000 model/ --to safetensors --model-only --dtype bf16",
        "ckptool convert model.pt model-dcp/ --to dcp --rename '^module\\.='",
    ),
    "reshard": (
        "ckptool reshard runs/step-1000 --mesh dp=4,tp=2 --dry-run",
        "torchrun --nproc-per-node 8 -m ckptool reshard SRC DST --mesh 2x4 --check",
    ),
    "merge": (
        "ckptool merge model-avg/ --average runs/step-800 runs/step-900 runs/step-1000",
        "ckptool merge model-ema/ --ema 0.9 runs/step-800 runs/step-900 runs/step-1000",
        "ckptool merge model-c/ --onto base/ --add tuned/ --minus base/ --scale 0.5",
        "ckptool merge model-mtp/ tuned/ --take 'mtp.*' FROM base/",
        "ckptool merge model-v2/ --apply-delta weight_v000001 weight_v000002 --onto base/",
        "ckptool merge model/ --lora adapter/ --onto base/",
    ),
    "verify": (
        "ckptool verify runs/step-1000 --strict",
        "ckptool verify runs/ --latest-good",
        "ckptool verify runs/step-1000 --against model/ --model-only",
    ),
    "prune": (
        "ckptool prune runs/ --keep-last 3 --keep-every 1000",
        "ckptool prune runs/ --keep-last 3 --yes",
        "ckptool prune runs/ --keep-last 3 --keep-every 1000 --no-optimizer",
    ),
    "bench": ("ckptool bench --size 4GiB --plot saving.svg",),
    "formats": ("ckptool formats --json",),
    "maps": ("ckptool maps torchtitan-llama3",),
    "help": ("ckptool help recipes", "ckptool help convert"),
}


ABOUT = (
    "ckptool PATH inspects what is there. ckptool help recipes lists the questions that people ask,"
    " with the command that answers each."
)
"""The end of ``ckptool --help``."""


def epilog(command: str) -> str:
    """Return the examples of a command as typer shows them: rich markup, one per line."""
    lines = (f"$ {example}".replace("[", "\\[") for example in EXAMPLES[command])
    return "\n".join(("Examples:", *lines))
