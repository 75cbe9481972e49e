"""Output of verify's answer: as text, JSON, JUnit, or with GitHub annotations."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from ckptool.cli.page import write_page
from ckptool.cli.parameters import parse_form
from ckptool.commands.options.question import FORMS

if TYPE_CHECKING:
    from ckptool.commands.verify.answer import Suite


class Answer(Struct, frozen=True):
    """An answer: ``show`` prints it for people, ``content`` builds the one JSON object.

    What ``is_data``, such as a path, has stdout for itself, even with --quiet.
    """

    suites: list[Suite]
    show: Callable[[], None]
    content: Callable[[], dict[str, Any]]
    is_data: bool = False


class Output(NamedTuple):
    """Where a report goes, and how."""

    form: str
    quiet: bool
    page: Path | None = None

    @classmethod
    def of(cls, form: str | None, *, as_json: bool, quiet: bool) -> Output:
        """Return the requested form, or else ``github`` if GitHub Actions runs this."""
        form = parse_form(form, FORMS, as_json=as_json)
        return cls(form or ("github" if _on_github() else "text"), quiet)

    def show(self, answer: Answer, *, strict: bool) -> None:
        """Print an answer. GitHub annotations go to stderr if stdout is data."""
        write_page(self.page, answer.content, quiet=self.quiet)
        data = answer.is_data or self.form in ("json", "junit")
        if not self.quiet and (self.form == "github" or _on_github()):
            from ckptool.render.ci import show_annotations

            show_annotations([suite.report for suite in answer.suites], stderr=data)
        if self.form == "json":
            from ckptool.render.data import print_json

            print_json(answer.content())
        elif self.form == "junit":
            from ckptool.render.ci import print_junit

            print_junit(answer.suites, strict=strict)
        elif answer.is_data or not self.quiet:
            answer.show()

    def show_codes(self) -> None:
        """Print what the finding codes mean."""
        from ckptool.render.data import print_json
        from ckptool.render.verify import codes_json, show_codes

        if self.form == "json":
            print_json(codes_json())
        else:
            show_codes()


def _on_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"
