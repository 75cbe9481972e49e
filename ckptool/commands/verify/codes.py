"""The codes of verify's findings: severity, meaning, and next step."""

from __future__ import annotations

from collections.abc import Iterable

from ckptool.commands.verify.comparison_codes import COMPARISON_CODES
from ckptool.commands.verify.severity import AGAIN, MIXED, Code, Severity
from ckptool.core.text import did_you_mean
from ckptool.errors import UNCODED, CkptoolError, Damaged, UsageError

_ERROR, _WARNING, _INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


_CODES: dict[str, dict[str, Code]] = {
    "files": {
        "file-missing": Code(_ERROR, "a file named by the metadata is missing", MIXED),
        "file-empty": Code(_ERROR, "a data file is empty", AGAIN),
        "file-truncated": Code(_ERROR, "a file is shorter than its metadata says", AGAIN),
        "file-type-mismatch": Code(_ERROR, "a file is not of the type that its name says", AGAIN),
        "file-unreadable": Code(_ERROR, "a file cannot be read"),
        "file-changed": Code(
            _ERROR,
            "a file was changed while it was read",
            "verify again when no process writes to it",
        ),
        "file-unused": Code(
            _WARNING,
            "a file that looks like part of the checkpoint but is not used",
            "convert and reshard ignore it: read it by its own path, or move it away",
        ),
        "part-named": Code(_INFO, "the named file is one part of the checkpoint that is read"),
        "checkpoint-nested": Code(
            _INFO, "another checkpoint is inside the folder", "give its path to read it"
        ),
        "side-file-missing": Code(
            _WARNING,
            "a side file named by the headers of safetensors files is missing",
            "put it back beside them: convert and reshard write the rest without it",
        ),
        "side-file-mismatch": Code(
            _ERROR,
            "a side file was not written with the safetensors files that it is beside",
            "put the one that belongs there in its place, or move it away to read the others alone",
        ),
        "file-incomplete": Code(_WARNING, "a temporary file of an unfinished write"),
        "bytes-unused": Code(
            _WARNING,
            "a data file contains unused bytes",
            "harmless by itself: a longer file was overwritten, or bytes were appended",
        ),
        "zeros-at-end": Code(
            _WARNING, "a file ends in zeros from a page boundary, as after a crash", AGAIN
        ),
        "path-outside": Code(
            _ERROR, "metadata names a path outside the checkpoint", "do not load it"
        ),
    },
    "save": {
        "save-incomplete": Code(
            _ERROR,
            "a save that did not finish",
            "use the previous checkpoint; the metadata is written last",
        ),
        "latest-missing": Code(
            _INFO,
            "the file that names the latest checkpoint of the run is missing",
            "Megatron-LM and DeepSpeed resume from the step that this file names",
        ),
        "overwrite-interrupted": Code(
            _ERROR,
            "data and metadata are from different saves",
            "a later save into the same folder was interrupted: use another checkpoint",
        ),
        "data-newer": Code(_INFO, "a data file was modified after the metadata that describes it"),
        "metadata-unreadable": Code(_ERROR, "a metadata file cannot be parsed", AGAIN),
        "rank-missing": Code(_ERROR, "data of a rank is missing", MIXED),
        "sharding-unrecorded": Code(
            _INFO,
            "the files do not record how the ranks' shards fit together",
            "set it with --tp-rule 'NAME=column'",
        ),
        "copy-damaged": Code(
            _WARNING, "one copy of a rank's file is damaged; another copy is used", AGAIN
        ),
        "config-mismatch": Code(
            _ERROR, "the model's config does not match its tensors", "use the config of this model"
        ),
        "config-missing": Code(
            _INFO, "config.json not found", "transformers needs it to load the model"
        ),
        "base-model-missing": Code(_INFO, "an adapter without its base model"),
        "rank-copied": Code(_ERROR, "a rank's file was written by another rank", AGAIN),
        "saves-mixed": Code(_ERROR, "the folder contains files of several saves", MIXED),
        "world-size-unrecorded": Code(_INFO, "the files do not record the number of ranks"),
    },
    "structure": {
        "zip-structure": Code(_ERROR, "a zip directory is damaged or contradicts itself", AGAIN),
        "zip-headers": Code(_ERROR, "a zip directory and a record's header differ", AGAIN),
        "archive-content": Code(_ERROR, "a zip that torch.save would not write", AGAIN),
        "archive-flat": Code(
            _WARNING,
            "a torch.save file that was packed again without its folder",
            "torch.load cannot read it: `ckptool convert` writes one that it can",
        ),
        "tar-structure": Code(
            _ERROR, "a tar archive is damaged, or has members that are not plain files", AGAIN
        ),
        "crc-mismatch": Code(_ERROR, "data does not match its checksum", AGAIN),
        "sha256-mismatch": Code(_ERROR, "a file does not match its listed SHA-256", AGAIN),
        "sha1-mismatch": Code(_ERROR, "a file does not match its listed SHA-1", AGAIN),
        "download-changed": Code(
            _WARNING, "a small file was changed since it was downloaded from the Hub"
        ),
        "md5-mismatch": Code(_ERROR, "a file does not match its listed MD5", AGAIN),
        "codec-corrupt": Code(_ERROR, "compressed data cannot be decoded", AGAIN),
        "transform-unknown": Code(
            _ERROR, "data uses an unsupported transform and cannot be checked"
        ),
        "legacy-stream": Code(_ERROR, "a legacy torch.save stream contradicts itself", AGAIN),
        "storage-mismatch": Code(
            _ERROR, "a storage is missing, or has another size than its pickle says", AGAIN
        ),
        "safetensors-header": Code(_ERROR, "a safetensors header breaks the format's rules", AGAIN),
        "safetensors-dtype": Code(_ERROR, "a safetensors header names an unknown element type"),
        "safetensors-gap": Code(_ERROR, "a safetensors file has bytes that no tensor uses", AGAIN),
        "safetensors-overlap": Code(_ERROR, "two tensors of a safetensors file share bytes", AGAIN),
        "safetensors-unaligned": Code(
            _INFO, "tensors of a safetensors file are not aligned to their element size"
        ),
        "index-unreadable": Code(_ERROR, "an index is not JSON with a weight_map", AGAIN),
        "index-mismatch": Code(_ERROR, "an index and the files beside it disagree", MIXED),
        "index-total-size": Code(_WARNING, "the total size in an index is wrong"),
        "index-unlisted": Code(_WARNING, "an index does not list all tensors"),
    },
    "tensors": {
        "chunk-gap": Code(_ERROR, "chunks do not cover a tensor", MIXED),
        "chunk-overlap": Code(_ERROR, "two chunks of a tensor share elements", MIXED),
        "chunk-outside": Code(_ERROR, "a chunk lies outside the tensor's shape", MIXED),
        "data-missing": Code(_ERROR, "metadata without data", MIXED),
        "data-unused": Code(_ERROR, "data that no chunk of the metadata claims", MIXED),
        "items-overlap": Code(_ERROR, "two items share bytes of a file", MIXED),
        "item-mismatch": Code(_ERROR, "the data of an item does not match the metadata", MIXED),
        "frozen-excluded": Code(
            _WARNING,
            "frozen parameters are not in the checkpoint",
            "take them from the model that training started from;"
            " convert the rest with --drop frozen",
        ),
        "frozen-unrecorded": Code(
            _INFO, "the files do not record whether frozen parameters were excluded"
        ),
        "sharding-unknown": Code(_ERROR, "where a shard belongs is not recorded", MIXED),
        "ranks-disagree": Code(_ERROR, "ranks differ in a tensor's shape, type or kind", MIXED),
        "replicas-differ": Code(
            _ERROR,
            "replicas of a tensor differ between ranks",
            "the ranks diverged, or files of two saves are mixed",
        ),
        "dtensor-contradiction": Code(
            _ERROR,
            "a DTensor's global shape, local shape, mesh and placements contradict each other",
            "the tensor was saved with wrong shapes and cannot be placed",
        ),
        "weight-delta": Code(
            _WARNING,
            "what changed since another version of a model, not its weights",
            "apply it with what wrote it to the weights of its base version",
        ),
        "tensor-record": Code(_ERROR, "a tensor's record contradicts itself", AGAIN),
        "tensor-unsupported": Code(
            _WARNING, "a tensor of an unsupported kind; only its bytes are checked"
        ),
        "parameters-flat": Code(
            _ERROR,
            "flat parameters without their original names and shapes",
            "save again with SHARDED_STATE_DICT or FULL_STATE_DICT",
        ),
        "name-mismatch": Code(_WARNING, "a tensor's name and its path differ"),
        "not-finite": Code(
            _WARNING,
            "NaN or infinite values in model or optimizer",
            "--fail-nonfinite makes it an error",
        ),
        "weight-zero": Code(
            _WARNING,
            "a weight of the model is all zero, while those of most layers are not",
            "a shard may not have been written; blocks that are added to a model may begin so",
        ),
        "weight-constant": Code(
            _WARNING, "a weight of the model is of one value, while those of most layers are not"
        ),
        "weight-denormal": Code(
            _WARNING, "a weight is of denormal values, while those of most layers are not"
        ),
        "layers-equal": Code(_INFO, "a layer is another one bit for bit, as no training leaves it"),
        "layers-fewer": Code(
            _INFO,
            "the last layers that arguments count are not there",
            "a load with these arguments looks for them; they may be left out on purpose",
        ),
        "ranks-fewer": Code(_INFO, "random states are those of one node's ranks, not of all"),
        "weights-differ-from-masters": Code(
            _WARNING,
            "weights are not the optimizer's masters, rounded to the weights' type",
            "a resume goes on from the masters, an export has the weights: they are two models",
        ),
        "weights-rounded-otherwise": Code(
            _INFO, "weights were rounded from their masters, but not to the nearest number"
        ),
        "parts-not-judged": Code(
            _INFO, "weights, masters and moments that several parts share were not compared"
        ),
        "moments-negative": Code(
            _WARNING,
            "an optimizer's means of squares are negative",
            "their roots are NaN: means and squares may be exchanged, or parts shifted",
        ),
        "moments-zero": Code(
            _WARNING,
            "an optimizer's moments are zero after steps that leave others",
            "the optimizer would begin again: its state may not have been written, or was shifted",
        ),
        "moments-copied": Code(
            _WARNING,
            "an optimizer's moments of one layer are those of another",
            "layers may have been mixed up when the state was written or converted",
        ),
        "optimizer-incomplete": Code(
            _WARNING, "some parameters lack optimizer state that others have"
        ),
        "optimizer-extra": Code(
            _WARNING,
            "optimizer state of parameters that are not there",
            "a resume ignores it, or the optimizer belongs to another model",
        ),
        "optimizer-shape": Code(_WARNING, "optimizer state and its parameter differ in shape"),
        "steps-differ": Code(
            _WARNING,
            "step counters differ between parameters or ranks",
            "files of two saves may be mixed; some parameters may also have had no gradient",
        ),
        "counts-differ": Code(
            _WARNING,
            "parts of a checkpoint count steps or data that its step contradicts",
            "files of two saves may be mixed, or a part was not saved: compare the step before",
        ),
        "counts-apart": Code(_INFO, "parts count steps or data as if one had been begun again"),
        "steps-apart": Code(_INFO, "a module has fewer steps: frozen at first, or of another save"),
        "steps-scattered": Code(_INFO, "nearly every parameter has its own step counter"),
    },
    "pickles": {
        "hostile-global": Code(
            _ERROR,
            "a pickle can run code; nothing was imported or called",
            "do not load this file with torch.load(weights_only=False) or pickle",
        ),
        "unknown-global": Code(
            _WARNING,
            "a pickle names a class or function unusual in checkpoints",
            "torch.load(weights_only=True) refuses it; load it only if you trust its source",
        ),
        "unknown-callable": Code(
            _ERROR,
            "a pickle names a class or function not known to be harmless",
            "torch.load(weights_only=False) calls it; if you trust its source, use --ignore"
            " unknown-callable",
        ),
        "pickle-bomb": Code(_ERROR, "a pickle expands to far more than its size", "do not load it"),
        "value-suspicious": Code(_WARNING, "a value that no writer produces", "do not load it"),
        "pickle-malformed": Code(_ERROR, "a pickle is malformed", AGAIN),
    },
    **COMPARISON_CODES,
    "limits": {
        "access-denied": Code(_ERROR, "a store refuses to be read; nothing was checked"),
        "no-answer": Code(_ERROR, "a store does not answer; nothing was checked"),
        "limit-exceeded": Code(_ERROR, "a limit of ckptool is exceeded; not checked"),
        "files-only": Code(
            _INFO, "tensors of this format are not read; only its files are checked"
        ),
        "no-checksum": Code(
            _INFO,
            "no checksum stored; changed values cannot be detected",
            "use --write-manifest to detect changes",
        ),
        "value-not-written": Code(_INFO, "a value that convert does not write in other formats"),
        "note": Code(_INFO, "additional information"),
        "damaged": Code(_ERROR, "the files contradict each other", MIXED),
    },
}
CODES = {name: code for codes in _CODES.values() for name, code in codes.items()}
CHECKS = {name: check for check, codes in _CODES.items() for name in codes}
"""The check that reports each code."""
ALWAYS = ("files", "save", "structure", "tensors", "pickles", "limits")
"""The checks that are always made."""


def next_step(error: CkptoolError) -> str | None:
    """Return the hint of an error: for damage without one of its own, that of its code."""
    if error.hint is not None or not isinstance(error, Damaged):
        return error.hint
    codes = {error.message.code, *(problem.code for problem in error.problems)} - {UNCODED}
    return CODES[codes.pop()].hint if len(codes) == 1 and codes <= CODES.keys() else None


def require_codes(codes: Iterable[str]) -> None:
    """Raise UsageError if one is not a code."""
    for code in codes:
        if code not in CODES:
            hint = did_you_mean(code, CODES, "list them: ckptool verify --codes")
            raise UsageError(f"--ignore {code}: no such code", hint=hint)
