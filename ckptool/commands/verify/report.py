"""What verify finds: stable codes, severities, and the report.

Every code that verify reports: how grave it is, what it means, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ckptool.errors import Problem, UsageError
from ckptool.storage.url import Location


class Severity(Enum):
    """``error``: not sound. ``warning``: fails with --strict. ``info``: for people to know."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


def failing(strict: bool) -> frozenset[Severity]:
    """The severities that make a checkpoint unsound."""
    return frozenset([Severity.ERROR, Severity.WARNING] if strict else [Severity.ERROR])


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that verify found.

    ``code`` is stable, in kebab-case; ``file`` is relative to the checkpoint's root; ``message``
    says the thing, the problem and the numbers, ``hint`` the next step.
    """

    code: str
    severity: Severity
    message: str
    file: str | None = None
    tensor: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verify found at ``path``.

    ``depth`` says what was read (``content``, ``quick``, ``sample``), ``nbytes`` how many bytes of
    data. ``sentence`` ends the report; ``sound`` decides the exit code.
    """

    path: Location
    format: str | None
    findings: tuple[Finding, ...]
    sound: bool
    sentence: str
    depth: str = "content"
    nbytes: int = 0
    files: int = 0
    tensors: int = 0

    def of(self, severity: Severity) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity is severity]

    def fails(self, strict: bool) -> list[Finding]:
        """The findings that make it unsound."""
        return [finding for finding in self.findings if finding.severity in failing(strict)]


_ERROR, _WARNING, _INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
_AGAIN = "take another copy of the file, or the checkpoint before it"
_MIXED = "the save was interrupted, or files were lost or mixed with those of another save"


class Code(NamedTuple):
    """The severity of a code, what it means, and the next step."""

    severity: Severity
    meaning: str
    hint: str | None = None


CODES: dict[str, Code] = {
    # Files
    "file-missing": Code(_ERROR, "metadata names a file that is not there", _MIXED),
    "file-empty": Code(_ERROR, "a file that should hold data has 0 bytes", _AGAIN),
    "file-truncated": Code(_ERROR, "a file ends before what it should hold", _AGAIN),
    "file-unrecognised": Code(_ERROR, "a file is not what its name says", _AGAIN),
    "file-unreadable": Code(_ERROR, "the system refuses to read a file"),
    "file-changed": Code(
        _ERROR, "a file was changed while it was read", "verify again once nothing writes into it"
    ),
    "file-extra": Code(
        _WARNING,
        "a file that looks like part of a checkpoint, and that nothing read",
        "convert and reshard leave it out: read it by its own path, or move it away",
    ),
    "checkpoint-beside": Code(
        _INFO, "another checkpoint lies below the folder", "name its folder to read it"
    ),
    "file-unfinished": Code(_WARNING, "a file whose name says that its writing never ended"),
    "bytes-unclaimed": Code(
        _WARNING,
        "bytes of a data file that belong to nothing",
        "harmless alone: a longer file of an earlier save was overwritten, or bytes were appended",
    ),
    "zeros-at-end": Code(
        _WARNING,
        "a file is zeros from a page to its end, as after a crash before all was written",
        _AGAIN,
    ),
    "path-outside": Code(_ERROR, "metadata names a path outside the checkpoint", "do not load it"),
    # The whole
    "save-unfinished": Code(
        _ERROR,
        "a save that was never committed",
        "take the checkpoint before it; metadata is written last, once all data is safe",
    ),
    "latest-unnamed": Code(
        _INFO,
        "nothing in a run's folder says which checkpoint is the latest",
        "Megatron-LM and DeepSpeed resume by that file alone: write the step's name into it",
    ),
    "torn-overwrite": Code(
        _ERROR,
        "data and metadata are of two saves",
        "a later save into the same folder was interrupted: take another checkpoint",
    ),
    "data-newer": Code(
        _INFO, "a data file was modified after the metadata that describes it"
    ),
    "metadata-unreadable": Code(_ERROR, "a metadata file cannot be understood", _AGAIN),
    "rank-missing": Code(_ERROR, "what a rank should have written is not there", _MIXED),
    "ranks-unplaced": Code(
        _INFO,
        "nothing in the files says how the ranks' parts of a tensor fit together",
        "--tp-rule 'GLOB=column' says it, wherever the tensor is read",
    ),
    "copy-damaged": Code(
        _WARNING, "one of several copies of a rank's file is damaged; another is read", _AGAIN
    ),
    "config-mismatch": Code(
        _ERROR, "a model's config says otherwise than its tensors", "take the config of this model"
    ),
    "config-missing": Code(
        _INFO, "a model's folder without config.json", "transformers loads no model without it"
    ),
    "adapter-alone": Code(_INFO, "an adapter without the model that it belongs to"),
    "rank-copied": Code(_ERROR, "a rank's file was written by another rank", _AGAIN),
    "saves-mixed": Code(_ERROR, "files of several saves lie together", _MIXED),
    "world-unrecorded": Code(_INFO, "nothing in the files records the number of ranks"),
    # Archives, headers, indexes
    "zip-structure": Code(_ERROR, "a zip directory is damaged or contradicts itself", _AGAIN),
    "zip-headers": Code(_ERROR, "a zip directory and what stands beside a record differ", _AGAIN),
    "archive-content": Code(_ERROR, "a zip that is not as torch.save writes it", _AGAIN),
    "crc-mismatch": Code(
        _ERROR, "bytes are not those whose checksum the writer recorded", _AGAIN
    ),
    "sha256-mismatch": Code(
        _ERROR, "a file is not the one whose SHA-256 is listed beside it", _AGAIN
    ),
    "md5-mismatch": Code(_ERROR, "a file is not the one whose MD5 is listed beside it", _AGAIN),
    "codec-corrupt": Code(_ERROR, "compressed data cannot be decoded", _AGAIN),
    "transform-unknown": Code(
        _ERROR, "data went through a transform that ckptool cannot undo, so it cannot be checked"
    ),
    "legacy-stream": Code(_ERROR, "a legacy torch.save stream contradicts itself", _AGAIN),
    "storage-mismatch": Code(
        _ERROR, "a storage is missing, or has another size than its pickle says", _AGAIN
    ),
    "safetensors-header": Code(_ERROR, "a safetensors header breaks the format's rules", _AGAIN),
    "safetensors-dtype": Code(_ERROR, "a safetensors header names an unknown element type"),
    "safetensors-hole": Code(_ERROR, "bytes of a safetensors file belong to no tensor", _AGAIN),
    "safetensors-overlap": Code(_ERROR, "two tensors of a safetensors file share bytes", _AGAIN),
    "safetensors-unaligned": Code(
        _INFO, "tensors of a safetensors file do not begin at multiples of their element's size"
    ),
    "index-unreadable": Code(_ERROR, "an index is no JSON with a weight_map", _AGAIN),
    "index-mismatch": Code(_ERROR, "an index and the files beside it disagree", _MIXED),
    "index-total-size": Code(_WARNING, "the total size in an index is wrong"),
    "index-unlisted": Code(_WARNING, "an index leaves out tensors that are there"),
    # Tensors
    "chunk-gap": Code(_ERROR, "chunks leave elements of a tensor out", _MIXED),
    "chunk-overlap": Code(_ERROR, "two chunks of a tensor share elements", _MIXED),
    "chunk-outside": Code(_ERROR, "a chunk lies outside the tensor's shape", _MIXED),
    "data-missing": Code(_ERROR, "metadata without data", _MIXED),
    "data-unclaimed": Code(_ERROR, "data that no chunk of the metadata claims", _MIXED),
    "items-overlap": Code(_ERROR, "two items share bytes of a file", _MIXED),
    "item-mismatch": Code(
        _ERROR, "what lies at an item's place is not what the metadata says", _MIXED
    ),
    "frozen-excluded": Code(
        _WARNING, "frozen parameters were left out when the checkpoint was saved",
        "they are those that training began with; --drop frozen converts what is there",
    ),
    "frozen-unrecorded": Code(
        _INFO, "nothing records whether frozen parameters were left out when it was saved"
    ),
    "sharding-unknown": Code(_ERROR, "nothing says where a tensor's part belongs", _MIXED),
    "ranks-disagree": Code(_ERROR, "ranks differ in a tensor's shape, type or kind", _MIXED),
    "replicas-differ": Code(
        _ERROR, "ranks hold different values of what should be one tensor",
        "the ranks had gone apart, or files of two saves are mixed",
    ),
    "dtensor-contradiction": Code(
        _ERROR, "a DTensor's global shape, local shape, mesh and placements contradict each other",
        "wrong wrapper shapes at save time: the values cannot be placed",
    ),
    "tensor-record": Code(_ERROR, "a tensor's record contradicts itself", _AGAIN),
    "tensor-unread": Code(
        _WARNING, "a tensor of a kind that ckptool does not read; its bytes are checked, not more"
    ),
    "parameters-flat": Code(
        _ERROR, "flat parameters without a map to the parameters they are made of",
        "save again with SHARDED_STATE_DICT or FULL_STATE_DICT",
    ),
    "name-mismatch": Code(_WARNING, "a tensor's name and its path differ"),
    "not-finite": Code(_WARNING, "NaN or infinite values in model or optimizer",
        "--fail-nonfinite makes it an error",
   ),
    "optimizer-incomplete": Code(
        _WARNING, "optimizer state that other parameters have is missing for some"
    ),
    "optimizer-shape": Code(_WARNING, "optimizer state of another shape than its parameter"),
    "steps-differ": Code(
        _WARNING, "step counters differ between parameters or ranks",
        "files of two saves may be mixed; some parameters may also have had no gradient",
    ),
    "steps-scattered": Code(_INFO, "nearly every parameter has a step counter of its own"),
    # Pickles
    "hostile-global": Code(
        _ERROR, "a pickle names what can run code; nothing was imported or called",
        "do not load this file with torch.load(weights_only=False) or pickle",
    ),
    "unknown-global": Code(
        _WARNING, "a pickle names a class or function that checkpoints do not normally hold",
        "torch.load(weights_only=True) refuses it; load it only where you trust its writer",
    ),
    "unknown-callable": Code(
        _ERROR, "a pickle names a class or function that is not known to be data",
        "torch.load(weights_only=False) calls it; where you trust its writer, --ignore"
        " unknown-callable",
    ),
    "pickle-bomb": Code(_ERROR, "a pickle unfolds to far more than it is", "do not load it"),
    "value-odd": Code(_WARNING, "a value that no writer of checkpoints makes", "do not load it"),
    "pickle-malformed": Code(_ERROR, "a pickle is malformed", _AGAIN),
    # Against another checkpoint
    "tensor-missing": Code(_ERROR, "a tensor that the other does not have"),
    "tensor-extra": Code(_ERROR, "a tensor that only the other has"),
    "shape-differs": Code(_ERROR, "a tensor of another shape"),
    "dtype-differs": Code(
        _ERROR, "a tensor of another element type",
        "--cast compares the model's weights after casting; --rtol and --atol compare numbers",
    ),
    "tensor-differs": Code(_ERROR, "a tensor with other values"),
    "value-missing": Code(_ERROR, "a value besides tensors that the other does not have"),
    "value-extra": Code(_ERROR, "a value besides tensors that only the other has"),
    "value-differs": Code(_ERROR, "a value besides tensors that is another one"),
    "value-not-compared": Code(
        _WARNING, "what ckptool does not read, and so does not compare",
        "--drop NAME leaves it out",
    ),
    "companion-missing": Code(_WARNING, "a file that goes with the model, which the other lacks"),
    "companion-differs": Code(_WARNING, "a file that goes with the model and is another one"),
    "values-not-held": Code(
        _ERROR, "values besides tensors, where a format holds tensors alone",
        "--model-only compares the model alone; --drop 'GLOB' leaves values out",
    ),
    "not-chosen": Code(_INFO, "what the options leave out: it is not compared, nor proved"),
    "nothing-compared": Code(
        _ERROR, "the two have no tensor and no value in common",
        "--model-only, --strip-prefix and --rename change the names on this side",
    ),
    # By a manifest
    "manifest-missing": Code(_ERROR, "the manifest has it, the checkpoint does not"),
    "manifest-extra": Code(_ERROR, "the checkpoint has it, the manifest does not"),
    "manifest-differs": Code(_ERROR, "it is not as the manifest says"),
    "manifest-unproved": Code(_ERROR, "what is in no digest, and whose files are other ones"),
    "manifest-incomplete": Code(
        _WARNING, "what is in no digest of a tensor or value",
        "only the same files prove it, no copy in another format",
    ),
    "manifest-other-files": Code(
        _INFO, "other files than the manifest was made of; tensors and values are what counts"
    ),
    # What cannot be known
    "limit-exceeded": Code(
        _ERROR, "more than ckptool reads; whether it is whole is not known",
    ),
    "files-only": Code(
        _INFO, "a format whose tensors ckptool does not put together; its files are checked"
    ),
    "no-checksum": Code(
        _INFO, "the format stores no checksum, so that changed values cannot be seen",
        "a manifest proves them",
    ),
    "value-not-carried": Code(
        _INFO, "what convert and reshard leave behind, though dcp takes any value",
    ),
    "note": Code(_INFO, "a remark"),
    "damaged": Code(_ERROR, "a contradiction of another kind", _MIXED),
}  # fmt: skip


def require_codes(codes: Iterable[str]) -> None:
    """UsageError where one is no code."""
    unknown = next((code for code in codes if code not in CODES), None)
    if unknown is not None:
        raise UsageError(f"--ignore {unknown}: no such code", hint=_similar(unknown))


def _similar(code: str) -> str:
    import difflib

    close = difflib.get_close_matches(code, CODES, n=1)
    return f"did you mean {close[0]} ?" if close else "one of " + ", ".join(CODES)


def finding_of(problem: Problem) -> Finding:
    """A problem with the severity and the next step of its code."""
    code = CODES[problem.code]
    return Finding(
        problem.code, code.severity, str(problem), problem.file, problem.tensor, code.hint
    )
