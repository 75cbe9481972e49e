"""The codes of what is compared with another checkpoint, a model or a manifest."""

from __future__ import annotations

from ckptool.commands.verify.severity import MIXED, Code, Severity

_ERROR, _WARNING, _INFO = Severity.ERROR, Severity.WARNING, Severity.INFO

COMPARISON_CODES: dict[str, dict[str, Code]] = {
    "comparison": {
        "tensor-missing": Code(_ERROR, "a tensor that is only in A"),
        "tensor-extra": Code(_ERROR, "a tensor that is only in B"),
        "shape-differs": Code(_ERROR, "the shapes of a tensor differ"),
        "dtype-differs": Code(
            _ERROR,
            "the element types of a tensor differ",
            "use --cast to compare model weights after casting, or --rtol and --atol",
        ),
        "tensor-differs": Code(_ERROR, "the values of a tensor differ"),
        "value-missing": Code(_ERROR, "a non-tensor value that is only in A"),
        "value-extra": Code(_ERROR, "a non-tensor value that is only in B"),
        "value-differs": Code(_ERROR, "a non-tensor value differs"),
        "tensor-not-compared": Code(
            _ERROR,
            "a tensor of an unsupported kind, so not compared",
            "exclude it with --drop NAME",
        ),
        "value-not-compared": Code(
            _WARNING, "of an unsupported kind, so not compared", "exclude it with --drop NAME"
        ),
        "companion-missing": Code(_WARNING, "a file of the model that is only in A"),
        "companion-differs": Code(_WARNING, "a file of the model differs"),
        "values-unsupported": Code(
            _ERROR,
            "non-tensor values that the other format cannot store",
            "compare the model with --model-only, or exclude values with --drop 'NAME'",
        ),
        "metadata-differs": Code(
            _ERROR,
            "the __metadata__ of safetensors files differs",
            "exclude it with --drop-metadata KEY, or say with --metadata KEY=TEXT what B should"
            " have",
        ),
        "like-missing": Code(
            _ERROR, "a tensor that the model it should be has, and it lacks", MIXED
        ),
        "like-extra": Code(_WARNING, "a tensor that the model it should be does not have"),
        "like-shape": Code(_ERROR, "a tensor has another shape than in the model it should be"),
        "like-unnamed": Code(
            _ERROR,
            "most names are not those of the model it should be, so nothing was compared",
            "give it these names with --map (and --hf-assets or --dim), --strip-prefix or --rename",
        ),
        "like-unchanged": Code(
            _ERROR,
            "a tensor that should have changed is equal to the other's",
            "it was frozen, had no gradient, or was saved from the model that training began with",
        ),
        "like-changed": Code(
            _ERROR,
            "a tensor that should be equal to the other's is not",
            "`ckptool diff --values` shows how much what changed",
        ),
        "excluded": Code(_INFO, "excluded by the options: not compared"),
        "nothing-compared": Code(
            _ERROR,
            "no tensor could be compared",
            "--model-only, --strip-prefix and --rename change names",
        ),
    },
    "manifest": {
        "manifest-missing": Code(_ERROR, "in the manifest, not in the checkpoint"),
        "manifest-extra": Code(_ERROR, "in the checkpoint, not in the manifest"),
        "manifest-differs": Code(_ERROR, "differs from the manifest"),
        "manifest-unchecked": Code(
            _ERROR, "cannot be checked: the manifest has no digest of it, and the files differ"
        ),
        "manifest-incomplete": Code(
            _WARNING,
            "not covered by a digest of a tensor or value",
            "only identical files can be checked, not copies in another format",
        ),
        "manifest-other-files": Code(
            _INFO, "files differ from those of the manifest; tensors and values are compared"
        ),
    },
}
