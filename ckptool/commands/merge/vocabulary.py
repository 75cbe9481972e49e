"""What sources of a merge say beside their tensors: the tokens of rows, templates, the config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
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
from ckptool.serialization.source import LARGEST, parse_json_object, read_metadata
from ckptool.storage.place import on_disk

_TOKENIZERS = ("tokenizer.json", "vocab.json")
"""Files that state the token of each row, those of tokenizers and, before these, of GPT-2."""
_TEMPLATE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""The file of a chat's template in transformers 5, and the one that had it before."""
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
    first, first_text = "", b""
    for operand in filter(_has_tokens, operands):
        text = _first_of(partial(_read_companion, operand))
        if text is None or text == first_text:
            continue
        if not first:
            first, first_text = operand.label, text
            continue
        tokens, others = _tokens(first_text), _tokens(text)
        differing = [row for row, token in tokens.items() if others.get(row, token) != token]
        if differing:
            row = min(differing)
            raise Unsupported(
                f"{first} and {operand.label} have other vocabularies:"
                f" {plural(len(differing), 'row')} of other tokens, such as {row:,}:"
                f" {tokens[row]!r} and {others[row]!r}",
                hint="--hf-assets FOLDER with the tokenizer of the result merges them nevertheless;"
                " --drop leaves out the embedding and the head",
            )


def _has_tokens(operand: Operand) -> bool:
    """Return whether a checkpoint has tensors of which each row is a token's."""
    names = operand.catalog.tensors
    return any(EMBEDDING.fullmatch(name) or HEAD.fullmatch(name) for name in names)


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


def notes_on_tokenizer(base: Operand, adapter: Operand, assets: Path | None) -> Iterator[str]:
    """Yield a note if an adapter's folder has other tokens or another template than the base.

    The result has the base's, as the adapter may have none.
    """
    place = adapter.opened.path
    folder = on_disk(place if place.is_dir() else place.parent)
    if assets is not None or folder is None:
        return
    theirs, ours = partial(_read_local, folder), partial(_read_companion, base)
    texts = _first_of(theirs), _first_of(ours)
    templates = _template(theirs), _template(ours)
    others = {
        "other tokens": texts[0] != texts[1] and _has_more_tokens(*texts),
        "another chat template": templates[0] not in (None, templates[1]),
    }
    if differing := [what for what, is_other in others.items() if is_other]:
        yield (
            f"{folder} has {' and '.join(differing)} than {base.opened.path}, whose the result has:"
            f" --hf-assets {folder} takes the adapter's"
        )


def _decides(key: str) -> bool:
    is_of_tokens = key.endswith(("token_id", "token_ids"))
    return not (key in _SAYS_NOTHING or key.startswith("_") or is_of_tokens)


def _first_of(read: Callable[[str], bytes | None]) -> bytes | None:
    """Return the bytes of the file that states the tokens, None if there is none."""
    return next((text for text in map(read, _TOKENIZERS) if text is not None), None)


def _has_more_tokens(text: bytes | None, other: bytes | None) -> bool:
    """Return whether a tokenizer has a token for a row that the other has not."""
    tokens, other_tokens = (_tokens(one or b"{}") for one in (text, other))
    return any(other_tokens.get(row) != token for row, token in tokens.items())


def _template(read: Callable[[str], bytes | None]) -> object:
    """Return the template of chats, None if there is none."""
    if (text := read(_TEMPLATE)) is not None:
        return text.decode(errors="replace")
    return _object_of(read(_TOKENIZER_CONFIG) or b"{}").get("chat_template")


def _read_companion(operand: Operand, name: str) -> bytes | None:
    """Return the bytes of a file beside a checkpoint's tensors, None if there is none."""
    catalog, source = operand.opened.catalog, operand.opened.source
    files = {target: file for file, target in companion_targets(catalog).items()}
    return read_metadata(source, files[name]) if name in files else None


def _read_local(folder: Path, name: str) -> bytes | None:
    """Return the bytes of a file of a folder, None if it cannot be read, or is no small file."""
    path = folder / name
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= LARGEST:
            return path.read_bytes()
    return None


def _object_of(text: bytes) -> Mapping[str, Any]:
    """Return the object that a file of JSON is, an empty one for another file."""
    with suppress(Damaged):
        return parse_json_object(text, _TOKENIZERS[0])
    return {}


def _tokens(text: bytes) -> dict[int, str]:
    """Return the token of each row; what is no row or token, as in a file of another kind, not."""
    content = _object_of(text)
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
