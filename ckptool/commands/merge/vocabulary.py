"""What sources that are added up say beside their tensors: the tokens of rows, and the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from ckptool.commands.merge.operands import Operand
from ckptool.commands.merge.ties import EMBEDDING, HEAD
from ckptool.commands.model.assets import QUANTIZATION_KEYS
from ckptool.commands.model.records import CONFIG, DTYPE_KEYS, read_beside
from ckptool.core.text import list_some, plural
from ckptool.errors import Damaged, Unsupported
from ckptool.formats.companions import companion_targets
from ckptool.serialization.source import parse_json_object, read_metadata

_TOKENIZERS = ("tokenizer.json", "vocab.json")
"""Files that state the token of each row, those of tokenizers and, before these, of GPT-2."""
_SAYS_NOTHING = {*DTYPE_KEYS, *QUANTIZATION_KEYS, "transformers_version", "use_cache"}
"""Keys of a config that decide nothing of what tensors mean."""
_FEW = 3


def require_same_tokens(operands: Sequence[Operand], assets: Path | None) -> None:
    """Raise Unsupported if a row of embeddings is of one token in one source, of another in others.

    Tokens that only one has are none of that: rows are often more than tokens. A tokenizer in
    ``assets`` is the one of the result, so whoever gives it knows of the difference.
    """
    if assets is not None and any((assets / name).exists() for name in _TOKENIZERS):
        return
    texts = {
        operand.label: text
        for operand in operands
        if any(EMBEDDING.fullmatch(n) or HEAD.fullmatch(n) for n in operand.catalog.tensors)
        and (text := _tokenizer_of(operand)) is not None
    }
    if len({*texts.values()}) < 2:
        return
    (first, tokens), *others = ((label, _tokens(text)) for label, text in texts.items())
    for label, other in others:
        differing = [row for row, token in tokens.items() if other.get(row, token) != token]
        if differing:
            row = min(differing)
            raise Unsupported(
                f"{first} and {label} have other vocabularies: {plural(len(differing), 'row')} of"
                f" other tokens, such as {row:,}: {tokens[row]!r} and {other[row]!r}",
                hint="--hf-assets FOLDER with the tokenizer of the result merges them nevertheless;"
                " --drop leaves out the embedding and the head",
            )


def notes_on_configs(operands: Sequence[Operand], assets: Path | None) -> Iterator[str]:
    """Yield a note on each source whose config.json says otherwise than the one that is written."""
    if assets is not None:
        return
    first, *rest = ((operand, read_beside(operand.opened.source, CONFIG)) for operand in operands)
    for operand, config in rest:
        differing = [
            f"{key} {shortened(config[key])}, not {shortened(value)}"
            for key, value in first[1].items()
            if _decides(key) and key in config and config[key] != value
        ]
        if differing:
            yield (
                f"{CONFIG} of {operand.label} says {list_some(differing, _FEW)}: the result has"
                f" that of {first[0].label}"
            )


def _decides(key: str) -> bool:
    is_of_tokens = key.endswith(("token_id", "token_ids"))
    return not (key in _SAYS_NOTHING or key.startswith("_") or is_of_tokens)


def _tokenizer_of(operand: Operand) -> bytes | None:
    """Return the bytes of the file that states a checkpoint's tokens, None if there is none."""
    source = operand.opened.source
    names = {target: name for name, target in companion_targets(operand.opened.catalog).items()}
    file = next((names[name] for name in _TOKENIZERS if name in names), None)
    return None if file is None else read_metadata(source, file)


def _tokens(text: bytes) -> dict[int, str]:
    """Return the token of each row; what is no row or token, as in a file of another kind, not."""
    content: Mapping[str, Any] = {}
    with suppress(Damaged):
        content = parse_json_object(text, _TOKENIZERS[0])
    model, added = content.get("model", {"vocab": content}), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    pairs = list[tuple[object, object]]()
    if isinstance(vocabulary, Mapping):
        pairs += ((row, token) for token, row in vocabulary.items())
    elif isinstance(vocabulary, list):  # of Unigram: tokens with their scores
        pairs += ((row, item[0]) for row, item in enumerate(vocabulary) if _is_pair(item))
    for item in added if isinstance(added, list) else ():
        if isinstance(item, dict):
            pairs.append((item.get("id"), item.get("content")))
    return {row: token for row, token in pairs if isinstance(row, int) and isinstance(token, str)}


def _is_pair(item: object) -> bool:
    return isinstance(item, list) and len(item) == 2
