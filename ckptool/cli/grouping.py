"""Options that go together: a command has one parameter for them all."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

Command = Callable[..., None]


def with_groups(command: Command) -> Command:
    """The command with every group's fields as parameters of their own, in the group's place.

    A group is a parameter whose type is a dataclass with fields that are annotated as typer's
    options are. ``Annotated[Group, "Panel"]`` puts its options into a panel of the help.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        group, *panel = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(group):
            groups[parameter.name] = group
            parameters += _options_of(group, *panel)
        else:
            parameters.append(parameter.replace(annotation=hint))

    @wraps(command)
    def run(**said: Any) -> None:
        for name, group in groups.items():
            said[name] = group(**{field.name: said.pop(field.name) for field in fields(group)})
        command(**said)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _options_of(group: Any, panel: str | None = None) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_in_panel(hints[field.name], panel),
        )
        for field in fields(group)
    ]


def _in_panel(hint: Any, panel: str | None) -> Any:
    kind, option = get_args(hint)
    option = copy(option)
    option.rich_help_panel = panel or option.rich_help_panel
    return Annotated[kind, option]
