"""The packages and versions to measure, and how each resumes from ckptool's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ckptool


@dataclass(frozen=True)
class Writer:
    """A package, its versions, and the recipes that it makes. ``needs`` are installed once."""

    versions: tuple[str, ...]
    recipes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    resume: str = ""
    step: str = ""
    """What the folder of a step is called, for those that open no other."""
    first: Mapping[str, str] = field(default_factory=dict)
    """The version that first wrote what a recipe makes, where not all of them did."""
    python: Mapping[str, str] = field(default_factory=dict)
    """The Python that a version needs where it cannot be installed for ours."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """A package that a version needs older than the others do."""
    equal: str = "losses"
    """What the program prints, which must be the same."""

    def recipes_of(self, version: str) -> list[str]:
        """Return the recipes that a version can write."""
        since = {recipe: numbers(self.first.get(recipe, "0")) for recipe in self.recipes}
        return [recipe for recipe in self.recipes if since[recipe] <= numbers(version)]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


FOR_DEEPSPEED = "hjson msgpack ninja psutil py-cpuinfo pydantic tqdm einops".split()
WRITERS = {
    "accelerate": Writer(
        ("1.6.0", "1.10.1", "1.12.0", "1.15.0"),
        ("accelerate_folders", "accelerate_rank_files", "accelerate_whole"),
        ("psutil", "pyyaml", "packaging", "huggingface_hub"),
        "accelerate",
        first={"accelerate_rank_files": "1.15.0"},
    ),
    "transformers": Writer(
        ("5.23.0",),
        (),
        ("psutil", "pyyaml", "packaging", "accelerate", "tokenizers", "regex", "tqdm", "typer"),
        "transformers",
        step="checkpoint-2",
    ),
    "peft": Writer(
        ("0.18.1", "0.21.2"),
        ("peft/fsdp2", "peft/zero_3"),
        (
            *("transformers", "accelerate", "psutil", "pyyaml", "packaging", "tqdm"),
            *("deepspeed==0.19.8", *FOR_DEEPSPEED),
        ),
        "peft",
        equal="logits",
    ),
    "diffusers": Writer(
        ("0.42.1",),
        ("diffusers_pipeline",),
        (
            "transformers",
            "accelerate",
            "importlib_metadata",
            "pillow",
            "regex",
            "requests",
            "httpx",
        ),
        "diffusers",
        equal="outputs",
    ),
    "torchtitan": Writer(
        ("0.3.0",),
        (),
        (
            "torchdata",
            "datasets",
            "tokenizers",
            "tyro",
            "tensorboard",
            "fsspec",
            "spmd_types==0.2.3",
        ),
        "torchtitan",
        step="step-2",
    ),
    "lightning": Writer(
        ("2.5.1", "2.5.6", "2.6.6"),
        ("dcp_lightning",),
        ("pyyaml", "packaging", "tqdm", "fsspec", "torchmetrics", "lightning-utilities"),
        "lightning",
    ),
    "deepspeed": Writer(
        ("0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.9", "0.19.8"),
        ("deepspeed_zero_2", "deepspeed_zero_3", "deepspeed_universal"),
        tuple(FOR_DEEPSPEED),
        "deepspeed",
    ),
    "verl": Writer(
        ("0.8.0", "0.9.1"),
        (),
        (
            *("accelerate", "transformers", "omegaconf", "peft", "msgpack", "protobuf", "pillow"),
            *("requests", "jsonschema", "torchdata", "pylatexenc", "codetiming", "tensordict"),
            *("datasets", "hydra-core", "ray", "orjson"),
        ),
        "verl",
    ),
    "torchtune": Writer(
        ("0.6.1",),
        (),
        (
            *("datasets", "huggingface_hub", "kagglehub", "sentencepiece", "tiktoken", "blobfile"),
            *("tokenizers", "omegaconf", "pillow", "torchao==0.10.0", "torchdata", "psutil"),
        ),
        "torchtune",
        step="dist_epoch_0",
    ),
    "megatron-core": Writer(
        ("0.12.3", "0.14.0", "0.16.1", "0.19.2"),
        ("megatron_torch", "megatron_torch_dist", "megatron_torch_dist_mixed"),
        ("einops", "packaging", "psutil"),
        python={"0.19.2": "3.12"},
        beside={"0.12.3": "numpy==1.26.4", "0.14.0": "numpy==1.26.4"},
    ),
    "nvidia-resiliency-ext": Writer(
        ("0.2.1", "0.3.0", "0.4.1"),
        ("megatron_local",),
        ("einops", "packaging", "psutil", "pyyaml", "megatron-core==0.16.1"),
    ),
}


@dataclass(frozen=True)
class Way:
    """What ckptool makes of a framework's checkpoint of 2 ranks, from which it then resumes.

    ``own`` and ``then`` are what the program is told, when it writes and reads its own, and when it
    reads ckptool's.
    """

    said: str
    make: Callable[[Path, Path], object]
    ranks: int = 2
    file: str = ""
    """What it is called, where it is no folder."""
    own: tuple[str, ...] = ()
    then: tuple[str, ...] = ()


def on(ranks: int) -> Way:
    """As the format of the source, for so many ranks."""
    made = partial(ckptool.reshard, mesh=str(ranks))
    return Way(f"{ranks} rank{'s' * (ranks > 1)}", made, ranks)


def through_dcp(name: str) -> Way:
    """As a format that is requested, of a plain folder of DCP that holds the ranks' state, too."""

    def make(own: Path, target: Path) -> None:
        between = target.with_name("dcp")
        ckptool.convert(own, between, to="dcp", per_rank=True)
        ckptool.reshard(between, target, mesh="2", to=name)

    return Way(f"2 ranks by way of DCP and `--to {name}`", make)


def zero(own: int, then: int) -> Way:
    """DeepSpeed's universal checkpoint of one stage of ZeRO, loaded at this or another."""
    make = partial(ckptool.convert, to="deepspeed-universal")
    return Way(f"ZeRO {own} to {then}", make, own=(str(own),), then=(str(then),))


def adapter(wrapper: str, said: str) -> Way:
    make = partial(ckptool.convert, to="hf", peft_adapter=True)
    return Way(f"the adapter out of {said}, as PEFT loads it", make, own=(wrapper,))


RESUMES = {
    "accelerate": (on(2), on(4), through_dcp("accelerate")),
    "transformers": (on(2), on(4)),
    "torchtitan": (on(2), on(4)),
    "lightning": (on(4), on(1), Way("one file", ckptool.convert, file="file.ckpt")),
    "verl": (on(2), on(4), through_dcp("verl")),
    "torchtune": (on(2), on(4)),
    "deepspeed": (zero(2, 1), zero(2, 2), zero(2, 3), zero(3, 3)),
    "peft": (adapter("fsdp2", "FSDP2"), adapter("zero-3", "ZeRO 3")),
    "diffusers": (Way("a pipeline", partial(ckptool.convert, to="hf")),),
}
"""What is made for the programs beside this one."""
ONE_SIZE = ("verl",)
"""Those that open their own folder on as many ranks as wrote it alone.

On others they are compared with what the first rank of 2 has, which is what each rank of any number
must have, as all train on the same rows.
"""
