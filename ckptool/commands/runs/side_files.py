"""The files that training goes on from, beside those that a step's checkpoints are read from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.runs.trainers import LAST_RECORD
from ckptool.commands.verify.checks.optimizer_names import StateName
from ckptool.commands.verify.findings import Affected, Finding
from ckptool.commands.verify.verification import Verification
from ckptool.commands.verify.verify import examine_side_file
from ckptool.core.catalog import Catalog
from ckptool.core.state_category import state_category
from ckptool.errors import CkptoolError, NoAnswer, Unrecognized
from ckptool.serialization.file_roles import role_of
from ckptool.storage.url import Location

_OF_TORCH = (".pt", ".pth", ".bin")
_NOT_WHOLE = frozenset(
    "file-empty file-truncated file-type-mismatch file-unreadable zip-structure zip-headers"
    " crc-mismatch legacy-stream storage-mismatch".split()
)
"""Codes of a file that is not all there; what else is in it is its trainer's own."""
_NOT_WHOLE_ARCHIVE = frozenset(["zip-structure", "crc-mismatch"])
"""The same of a file whose name says not what it is for: it need not be of torch.save."""
_ANOTHER = frozenset(
    "weights-differ-from-masters moments-negative moments-zero moments-copied counts-differ"
    " optimizer-incomplete optimizer-extra optimizer-shape weight-zero zeros-at-end"
    " zeros-inside".split()
)
"""The warnings after which a resume would go on with something else than what was trained."""
_NOT_FINITE = "not-finite"
_SQUARES = frozenset(["exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf"])
"""Kinds of state that are a mean of squares, or a largest one, which a step divides by."""
_LARGEST = 64 << 20
_SMALL = 1 << 20
"""Bytes of a file in JSON that is no record: a tokenizer has many more, and is read by no other."""


def damaged_side_files(
    step: Step, run: Run, examined: Sequence[Verification], options: VerifyOptions
) -> Iterator[str]:
    """Yield why files beside a step's checkpoints are not whole: an optimizer's, random states.

    Also records in JSON, of what was trained or what a trainer writes last: if one is cut off, the
    save was. So it was if another small file in JSON ends too early. Files that the ``examined``
    checkpoints are read from are verified with these. An optimizer must have taken the steps that
    the checkpoints count. Raises NoAnswer.
    """
    read: set[Location] = set()
    for survey in (verification.surveyed for verification in examined):
        folder = survey.path if survey.path.is_dir() else survey.path.parent
        read |= {folder / file for file in (survey.catalog.files if survey.catalog else ())}
    for entry in step.entries:
        for name, size in run.files_in(entry).items():
            file = entry / name if name else entry
            if not name or file in read:
                continue
            if _is_record(name):
                yield from _broken_record(file, size, name)
            elif name.endswith(".json") and size <= _SMALL:
                yield from _cut_off(file, name)
            elif name.endswith(_OF_TORCH) and _may_be_of_training(name, size):
                neighbours = [v for v in examined if v.surveyed.path == file.parent]
                yield from _broken_archive(file, name, neighbours, options)


def _is_record(name: str) -> bool:
    is_of_training = name.endswith(".json") and "/" not in name and role_of(name) == "record"
    return is_of_training or re.fullmatch(LAST_RECORD, name) is not None


def _may_be_of_training(name: str, size: int) -> bool:
    """Return whether a file may be a trainer's; models are checked elsewhere, as far as read."""
    role = role_of(name)
    return role != "model" and (role is not None or size <= _SMALL)


def _broken_archive(
    file: Location, name: str, neighbours: Sequence[Verification], options: VerifyOptions
) -> Iterator[str]:
    role = role_of(name)
    try:
        strict = replace(options, ignore=())
        report, catalog = examine_side_file(file, strict, neighbours)
    except NoAnswer:
        raise
    except Unrecognized:  # an empty state
        return
    except (CkptoolError, OSError) as error:
        if role is not None:
            yield f"{name}: {error}".replace(f"{name}: {file}: ", f"{name}: ")
        return
    not_whole = _NOT_WHOLE_ARCHIVE if role is None else _NOT_WHOLE
    for finding in report.findings:
        is_state = role == "optimizer" and finding.code not in options.ignore
        faults = faults_in([finding] if is_state else [], catalog, options)
        fault, accepted = next(faults, (finding, ""))
        if accepted or finding.code in not_whole:
            text = fault.first_line(f"{name.rpartition('/')[2]}: ")
            yield f"{finding.code}: {name}: {text}{accepted}"
            return


def faults_in(
    findings: Iterable[Finding], catalog: Catalog | None, options: VerifyOptions
) -> Iterator[tuple[Finding, str]]:
    """Yield what no training should go on from, and the words on the option that accepts it."""
    for finding in findings:
        if not options.allow_nonfinite and (fault := _spoiling(finding, catalog)):
            yield fault, " (--allow-nonfinite counts it as good)"
        elif finding.code in _ANOTHER:
            yield finding, f" (--ignore {finding.code} counts it as good)"


def _spoiling(finding: Finding, catalog: Catalog | None) -> Finding | None:
    """Return a finding of values, NaN or infinite, that are in the model, or will be after a step.

    It is of the first such tensor; None if there is none. An optimizer makes its parameters so, and
    masters become weights. A step divides by means of squares: where these are infinite, they only
    end the training of their own parameter, if they are not in the scales of codes.
    """
    if finding.code != _NOT_FINITE:
        return None
    entries = {} if catalog is None else catalog.tensors
    for affected in finding.affected:
        entry = entries.get(affected.tensor or "")
        if entry and state_category(entry) == "optimizer" and _ends_training(affected):
            continue
        message = finding.message.replace(finding.affected[0].message, affected.message, 1)
        return replace(finding, message=message)
    return None


def _ends_training(affected: Affected) -> bool:
    counts = affected.counts
    if not counts or StateName.of(affected.tensor or "").kind not in _SQUARES:
        return False
    return not (counts["nan"] or counts["below_zero"])


def _cut_off(file: Location, name: str) -> Iterator[str]:
    """Yield why a file in JSON is not whole, whatever is in it: it ends inside of something.

    Some are not quite JSON, such as lines of it, or have comments; a log may be a list without end,
    or have nothing in it yet.
    """
    try:
        text = file.read_bytes().decode().rstrip()
        if text and not text.strip("\0"):
            yield f"metadata-unreadable: {name}: has nothing but zeros, as after a crash"
            return
        json.loads(text)
    except NoAnswer:
        raise
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text) or error.msg.startswith("Unterminated")
        if is_cut and text.startswith("{"):
            yield f"metadata-unreadable: {name}: ends too early for JSON; it is cut off"
    except (CkptoolError, OSError, RecursionError, ValueError):
        return


def _broken_record(file: Location, size: int, name: str) -> Iterator[str]:
    try:
        if not size:
            yield f"file-empty: {name}: the file is empty (0 bytes)"
        elif size <= _LARGEST:
            json.loads(file.read_bytes())
    except NoAnswer:
        raise
    except (ValueError, RecursionError):
        yield f"metadata-unreadable: {name}: not JSON; it may be cut off"
    except (CkptoolError, OSError) as error:
        yield f"file-unreadable: {name}: {error}"
