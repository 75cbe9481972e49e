"""What can be asked of a checkpoint or of a run: by itself, by a manifest, or like another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.commands.options import FILE, PLACE
from ckptool.commands.options.declaration import FLAG, RUNS, OptionSet, changed, group, option
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.screen import HTML, form_option
from ckptool.commands.options.verify import (
    CompareOptions,
    FollowOptions,
    LikeOptions,
    ManifestOptions,
    VerifyOptions,
)
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.storage.url import Location

AGAINST = "Compare with another checkpoint, or with the model that it should be"
REWRITING = "What of SRC to compare, as `ckptool convert` would write it"
BESIDE = "Manifests, and what is left of damage"
FORMS = ("text", "json", "junit", "github")


class Question(OptionSet):
    """All that can be asked of a checkpoint or of a run, one at a time, and how it is answered."""

    check: VerifyOptions = group(VerifyOptions)
    against: Location | None = option(
        "--against",
        PLACE,
        metavar="OTHER",
        panel=AGAINST,
        help="Compare with this checkpoint, of any format, bit by bit.",
    )
    recipe: Path | None = option(
        "--recipe",
        FILE,
        panel=AGAINST,
        help="Compare with what this merge recipe computes from its sources.",
    )
    comparison: CompareOptions = group(CompareOptions, AGAINST)
    like: LikeOptions = group(LikeOptions, AGAINST)
    rewrite: RewriteOptions = group(RewriteOptions, REWRITING)
    manifest: ManifestOptions = group(ManifestOptions, BESIDE)
    latest_good: bool = option(
        "--latest-good",
        FLAG,
        panel=RUNS,
        help="Print only the path of the newest good step on stdout.",
    )
    every: bool = option("--all", FLAG, panel=RUNS, help="Verify every step; show a table.")
    following: FollowOptions = group(FollowOptions, RUNS)
    salvage: Location | None = option(
        "--salvage",
        PLACE,
        metavar="DST",
        panel=BESIDE,
        help="Write what is intact to DST (a DCP folder, or a .safetensors or .pt file), and next"
        " to it a list of what is lost.",
    )
    codes: bool = option("--codes", FLAG, help="List the finding codes and exit.")
    form: str | None = form_option(
        None,
        "Print text, json (as --json does), junit, or github: text with annotations; default:"
        " github where GITHUB_ACTIONS is true, else text.",
    )
    html: str | None = HTML

    @property
    def asked(self) -> list[str]:
        """What is asked besides whether it is sound, by its flag: one, or none."""
        return [*dict.fromkeys(_ASKED[flag] for flag in changed(self) if flag in _ASKED)]

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that answer it, besides those that are always made."""
        if {*_MANIFESTS} & {*self.asked}:
            return ("manifest",)
        return ("comparison",) if {*_BY_NAME} & {*self.asked} else ()

    def require_possible(self) -> None:
        """Raise UsageError for questions and options that cannot be combined."""
        questions = self.asked
        if len(questions) > 1:
            raise UsageError(
                f"{' and '.join(questions)}: one at a time", hint="one command for each"
            )
        question = questions[0] if questions else None
        self._require_checks(question)
        for field, users, needs, hint in _NEEDS:
            exceptions = {"--other-format"} if question == "--like" else set()
            flags = [flag for flag in changed(getattr(self, field)) if flag not in exceptions]
            if flags and question not in users:
                raise UsageError(
                    f"{flags[0]} says what to compare: it needs {needs}",
                    hint=hint.format(flags[0]),
                )
        if self.manifest.overwrite and question not in _WRITING:
            raise UsageError(
                "--overwrite replaces a manifest or what is salvaged: neither is written",
                hint="it needs --write-manifest FILE or --salvage DST",
            )

    def _require_checks(self, question: str | None) -> None:
        """Raise UsageError if the question, or another option, leaves a check without effect."""
        check = self.check
        if check.allow_nonfinite and question not in (_OF_RUN, "--follow"):
            raise UsageError(
                "--allow-nonfinite is for runs: it needs --latest-good, --all or --follow",
                hint="without --fail-nonfinite, NaN and infinite values are warnings",
            )
        if check.quick and check.sample < 1:
            raise UsageError(
                "--quick and --sample: one at a time",
                hint="--quick reads no data, --sample 5% some of it",
            )
        if check.seed and check.sample == 1:
            raise UsageError(
                "--seed selects what --sample reads: it needs --sample",
                hint=f"such as --sample 5% --seed {check.seed}",
            )
        if question in _OTHERS and (check.quick or check.sample < 1):
            raise UsageError(
                f"{question} compares every byte: it cannot be combined with --quick or --sample",
                hint="leave them out; `ckptool diff` compares names, shapes and types only",
            )
        if check.part is not None and question:
            raise UsageError(
                "--part checks a single checkpoint",
                hint="leave out --against, --recipe, --like, manifests, --salvage and what is of"
                " runs",
            )
        reading = VerifyOptions(check.read, workers=check.workers)
        if question == "--salvage" and check != reading:
            flags = [flag for flag in changed(check) if flag not in changed(reading)]
            raise UsageError(
                f"{flags[0]}: not with --salvage, which reads everything and writes what is intact",
                hint=f"one command for each: `ckptool verify SRC {flags[0]}` writes nothing",
            )


_OF_RUN = "--latest-good or --all"
_OTHERS = ("--against", "--recipe")
"""The questions that compare with all of another checkpoint."""
_WRITING = ("--write-manifest", "--salvage")
_MANIFESTS = ("--write-manifest", "--manifest")
_BY_NAME = (*_OTHERS, "--like", *_MANIFESTS)
"""The questions about tensors by their names, which may be others than SRC's own."""
_ASKED = {
    **{flag: flag for flag in (*_BY_NAME, "--follow", "--salvage", "--codes")},
    "--latest-good": _OF_RUN,
    "--all": _OF_RUN,
}
"""The flags that ask something, and what a message says of them."""
_NEEDS = (
    ("comparison", _OTHERS, "--against OTHER", "`ckptool verify SRC --against OTHER {} ...`"),
    (
        "rewrite",
        _BY_NAME,
        "--against OTHER, --like OTHER, --manifest or --write-manifest",
        "such as `ckptool verify SRC --against OTHER {}`",
    ),
    ("like", ("--like",), "--like OTHER", "`ckptool verify SRC --like OTHER {} ...`"),
)
"""Options of which field say more on which questions, and how to ask one."""
