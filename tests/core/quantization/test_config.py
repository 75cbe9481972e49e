"""Which part of a ``quantization_config`` is about which module."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ckptool.core.quantization import config
from ckptool.core.quantization.config import NO_GROUP, QuantizationConfig
from ckptool.errors import Unsupported


def config_of(*targets: str, ignore: tuple[str, ...] = ()) -> QuantizationConfig:
    groups = {f"group_{n}": {"targets": [target]} for n, target in enumerate(targets)}
    fields: dict[str, Any] = {"config_groups": groups, "ignore": list(ignore)}
    return QuantizationConfig(fields)


@pytest.mark.parametrize("where", [{"targets": ("re:(a|a)+$",)}, {"ignore": ("re:(a|a)+$",)}])
def test_a_pattern_that_never_ends_is_refused(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_LONGEST", 0.05)
    said = config_of(*where.get("targets", ()), ignore=where.get("ignore", ()))
    with pytest.raises(Unsupported, match=r"\(a\|a\)\+\$' takes too long to match aaaa.*-"):
        said.group_of("a" * 60 + "-")


def test_globs_and_patterns_leave_modules_out() -> None:
    said = config_of("Linear", ignore=("*.mtp.*", "re:.*head$", "model.norm"))
    out = ["model.mtp.0", "lm_head", "model.norm"]
    assert [said.group_of(module) for module in out] == [NO_GROUP] * 3
    assert said.group_of("model.head.0").name == "group_0"


@pytest.mark.parametrize("pattern", ["re:(", "re:x{1000000000}", "re:(x{9999}){9999}"])
def test_a_pattern_that_cannot_be_matched_is_refused(pattern: str) -> None:
    with pytest.raises(Unsupported, match=r"'re:.*': (missing|is too long, or repeats too much)"):
        config_of("Linear", ignore=(pattern,))


def test_many_patterns_for_many_modules_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them takes long for one module."""
    monkeypatch.setattr(config, "_LONGEST", 0.05)
    said = config_of(*(f"re:(x+x+)+y{n}" for n in range(40)))
    modules = [f"{'x' * 12}{module}" for module in range(1000)]
    with pytest.raises(Unsupported, match=r"takes too long to match .*: 0\.05 s are for all"):
        list(map(said.group_of, modules))


@pytest.mark.parametrize("key", ["targets", "ignore"])
def test_many_patterns_to_compile_are_bounded_in_all(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_LONGEST", 0.05)
    patterns = tuple(f"re:{'a?' * 500}{n}" for n in range(300))
    with pytest.raises(Unsupported, match=r"'re:a.* takes too long to compile: 0\.05 s are"):
        config_of(*patterns) if key == "targets" else config_of(ignore=patterns)


def test_a_pattern_too_long_to_compile_is_refused_at_once() -> None:
    started = time.thread_time()
    with pytest.raises(Unsupported, match="is too long"):
        config_of("re:" + "a" * 1_000_000)
    assert time.thread_time() - started < 1
