"""What verify sees of whole files that were lost, exchanged, renumbered, left over, or are older.

``ckptool/docs/verify.md`` says it in a table, a row a format; here it is measured.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from attack_files import KINDS, mutations, said_in_docs
from conftest import case
from test_verify_mutation import noise, read, reported_beyond

from ckptool.formats import FORMATS

MOST = 2
"""Mutations of a kind, of each fixture."""
FIXTURES = {
    "dcp": ("dcp_base", "dcp_fsdp2", "dcp_lightning", "torch_2_4_dcp"),
    "safetensors": (),
    "hf": ("hf_shards",),
    "dcp-safetensors": ("hf_sharded",),
    "torch-save": ("bin_shards",),
    "rank-local": ("rank_base", "rank_verl", "torch_checkpointing_safetensors"),
    "accelerate": ("accelerate_folders", "accelerate_rank_files"),
    "sharded-state": ("vllm_sharded_state",),
    "llama": ("llama_consolidated",),
    "deepspeed": (
        *("deepspeed_zero_2", "deepspeed_zero_3", "deepspeed_pipeline"),
        *("deepspeed_experts", "deepspeed_experts_zero_2"),
    ),
    "deepspeed-universal": ("deepspeed_universal",),
    "megatron-torch_dist": ("megatron_torch_dist",),
    "megatron-fsdp_dtensor": ("megatron_fsdp_dtensor",),
    "megatron-torch": ("megatron_torch", "megatron_torch_distributed"),
    "nvrx-local": ("megatron_local",),
    "torchsnapshot": ("snapshot", "snapshot_batched"),
    "bytecheckpoint": ("bytecheckpoint_ddp",),
    "orbax": (),
}
"""A format to the checkpoints it is measured with; none for what is one file, or not read."""
MUST_BE_NAMED = ("left over", "stray")
"""What is to be reported even where it changes nothing that is read."""


def seen(name: str, tmp_path: Path) -> dict[str, set[str]]:
    """Of each kind of mutation whether verify reported it: ``yes``, ``no``, or ``harmless``."""
    source = case(name).path
    truth, usual = read(source), noise(source)
    found: dict[str, set[str]] = {}
    for mutation in mutations(source, MOST):
        folder = tmp_path / "mutated"
        shutil.copytree(source, folder)
        mutation.change(folder)
        if reported_beyond(folder, usual):
            answer = "yes"
        elif read(folder) != truth or mutation.kind in MUST_BE_NAMED:
            answer = "no"
        else:
            answer = "harmless"
        found.setdefault(mutation.kind, set()).add(answer)
        shutil.rmtree(folder)
    return found


def in_a_word(answers: set[str]) -> str:
    if len(answers) > 1:
        answers = answers - {"harmless"}
    return "-" if not answers else "some" if len(answers) > 1 else next(iter(answers))


def test_the_table_has_every_format() -> None:
    assert list(said_in_docs()) == list(FIXTURES)
    assert set(FIXTURES) == {row.name for row in FORMATS.values() if row.probe is not None}


@pytest.mark.parametrize("name", [name for name, fixtures in FIXTURES.items() if fixtures])
def test_what_verify_sees_is_what_the_docs_say(name: str, tmp_path: Path) -> None:
    found: dict[str, set[str]] = {}
    for fixture in FIXTURES[name]:
        for kind, answers in seen(fixture, tmp_path).items():
            found.setdefault(kind, set()).update(answers)
    measured = {kind: in_a_word(found.get(kind, set())) for kind in KINDS}
    assert measured == said_in_docs()[name]
