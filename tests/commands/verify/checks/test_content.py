"""Where the elements of tensors are, as verify asks it."""

from __future__ import annotations

from conftest import case

from ckptool.commands.open import open_checkpoint
from ckptool.commands.verify.checks.content import located
from ckptool.core.catalog import Container


def test_what_has_no_containers_is_left_as_it_is() -> None:
    """Thousands of tensors in one safetensors are not gone through to find that none is one."""

    def chosen(container: Container) -> bool:
        raise AssertionError(container)

    opened = open_checkpoint(case("hf_full").path)
    tensors, problems = located(opened.format, opened.source, opened.catalog, chosen)
    assert tensors is opened.catalog.tensors
    assert not problems
