"""Wrappers in the names of a model, and the rule that removes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ckptool.core.selection import substitution

WRAPPERS = (
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "_forward_module",
    "module",
    "pytorch_model_fsdp",
)
"""Name steps of torch.compile, activation checkpointing, FSDP1, Fabric, DDP and accelerate."""


def wrappers_of(names: Collection[str]) -> list[str]:
    """Return the wrappers in a model's names; ``module`` only if it begins all names.

    Inside of some names it may be a module of the model itself.
    """
    steps = {step for name in names for step in name.split(".")[:-1]}
    if not names or not all(name.startswith("module.") for name in names):
        steps.discard("module")
    return [wrapper for wrapper in WRAPPERS if wrapper in steps]


def unwrapping_rule(names: Collection[str], wrappers: Collection[str] = WRAPPERS) -> str | None:
    """Return the ``--rename`` rule that removes wrappers from the names, None if there are none.

    Also None if two names would become one.
    """
    steps = {step for name in names for step in name.split(".")[:-1]}
    wrappers = [wrapper for wrapper in wrappers if wrapper in steps]
    rule = rf"(^|\.)(({'|'.join(wrappers)})\.)+=\1"
    return rule if wrappers and len({*map(substitution(rule), names)}) == len(names) else None


def unwrapping_hint(names: Sequence[str], is_known: Callable[[str], bool]) -> str | None:
    """Return a hint at the option that makes all names known ones; None if none does."""
    rule = unwrapping_rule(names)
    if rule is None or not all(map(is_known, map(substitution(rule), names))):
        return None
    return f"--rename '{rule}' removes the wrappers from the names"
