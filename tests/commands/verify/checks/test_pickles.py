"""What a pickle may name without a finding, with a warning, and not at all."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.commands.verify.checks.pickles import PickleAudit
from ckptool.commands.verify.codes import Severity

CODES = {
    "torch.distributed.checkpoint.state_dict_loader load": "hostile-global",
    "torch.ops load_library": "hostile-global",
    "torch.utils.data.datapipes.iter.fileopener FileOpenerIterDataPipe": "hostile-global",
    "torch.utils.data._utils.worker _worker_loop": "hostile-global",
    "torch.distributed.checkpoint load": "unknown-callable",
    "torch.distributed.tensor distribute_tensor": "unknown-callable",
    "mylib run": "unknown-callable",
    "mylib Settings": "unknown-callable",
    "numpy fromfile": "unknown-callable",
    "transformers.training_args TrainingArguments": "unknown-global",
    "ultralytics.utils IterableSimpleNamespace": "unknown-global",
    "torch.nn.modules.linear Linear": "unknown-global",
    "torch.utils.data.distributed DistributedSampler": "unknown-global",
    "torch.distributed.checkpoint.metadata Metadata": None,
    "torchao.optim.subclass_8bit OptimState8bit": None,
    "torchao.quantization.quantize_.workflows.int8.int8_tensor Int8Tensor": None,
    "torchao.quantization quantize_": "unknown-callable",
    "megatron.core.transformer.enums InferenceCudaGraphScope": None,
    "megatron.core.transformer.module MegatronModule": "unknown-global",
    "omegaconf.dictconfig DictConfig": None,
    "numpy.random._pickle __generator_ctor": None,
}


@pytest.mark.parametrize("name", CODES)
def test_a_name_has_its_code(name: str) -> None:
    audit = PickleAudit()
    module, _, item = name.partition(" ")
    audit.look_at(f"c{module}\n{item}\n.".encode(), "a.pkl", 0)
    assert [problem.code for problem in audit.problems] == [CODES[name]] * (CODES[name] is not None)


def test_settings_that_frameworks_save_have_no_finding(tmp_path: Path) -> None:
    args = Namespace(init=functools.partial(torch.nn.init.normal_, std=0.02), dtype=torch.half)
    state = {"w": torch.ones(2), "args": args, "torch": torch.__version__}
    torch.save(state, tmp_path / "a.pt")
    found = ckptool.verify(tmp_path / "a.pt").findings
    assert {finding.severity for finding in found} <= {Severity.INFO}


def test_a_sampler_beside_the_model_is_a_warning(tmp_path: Path) -> None:
    sampler = torch.utils.data.RandomSampler(range(4))
    torch.save({"model": {"w": torch.ones(2)}, "sampler": sampler}, tmp_path / "a.pt")
    assert ckptool.open(tmp_path / "a.pt").tensors.keys() == {"model.w"}
    report = ckptool.verify(tmp_path / "a.pt")
    assert report.ok
    assert {f.code for f in report.findings} == {"unknown-global", "value-not-written"}
