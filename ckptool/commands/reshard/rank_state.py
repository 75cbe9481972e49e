"""State that each rank of the source holds for itself, and its treatment on another mesh."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.options.declaration import parse_whole
from ckptool.core.catalog import Catalog, ObjectEntry, Path, RankStep, TensorEntry
from ckptool.core.mesh import Mesh
from ckptool.core.selection import AnyEntry, drop_names, entries_of, with_entries, without_rank
from ckptool.core.state_category import RANDOM, state_category_of_name
from ckptool.core.text import list_some, plural, ranges
from ckptool.errors import Unsupported, UsageError
from ckptool.formats.companions import loader_ranks

WORDS = ("drop-rng", "stop", "keep", "drop")
_OWN_NAME = re.compile(r"(?P<name>.*)@rank(?P<rank>[0-9]{1,9})")

RANDOM_STATE = "random number state"
OWN_NUMBER = "rank number"
OTHER_STATE = "other value"
_PYTHON_WORDS = 625
"""Of ``random.getstate``: 624 words and a position."""

_Entry = TensorEntry | ObjectEntry | str
"""A rank's entry, or why it cannot be read."""
_States = Mapping[str, Mapping[int, _Entry]]
"""The entry of each rank under one name."""


class DroppedState(Struct, frozen=True):
    """A tensor or value that is not written. ``ranks`` have one each; empty if all agree."""

    name: str
    kind: str
    ranks: tuple[int, ...]


def require_rank_state(what: str) -> None:
    """Raise UsageError if ``what`` is neither a known choice nor a rank."""
    if what not in WORDS and parse_whole(what) is None:
        raise UsageError(
            f"invalid --rank-state {what!r}", hint=f"{', '.join(WORDS)}, or a rank of the source"
        )


def resolve_rank_state(
    catalog: Catalog, what: str, *, same_ranks: bool = False
) -> tuple[Catalog, tuple[DroppedState, ...]]:
    """Return the catalog with the kept part of state that differs between ranks, and the rest.

    ``what`` is ``drop-rng``, ``drop``, ``keep``, ``stop`` or a rank's number. ``same_ranks`` means
    that there are as many ranks as in the source, each with its own state: ``drop-rng`` then drops
    nothing. Raises Unsupported, with the list, for state that is neither kept nor dropped;
    UsageError if the given rank has none. Unreadable state that is kept is refused elsewhere.
    """
    catalog = with_entries(catalog, [_with_rank_step(entry) for entry in entries_of(catalog)])
    states = _list_states(catalog)
    readable = [name for name, ranks in states.items() if not all(map(_is_refused, ranks.values()))]
    if (rank := parse_whole(what)) is not None:
        return _take_rank(catalog, states, rank) if readable else (catalog, ())
    kinds = {name: _kind(name, ranks) for name, ranks in states.items()}
    names = {
        "drop": list(states),
        "drop-rng": [name for name, kind in kinds.items() if kind != OTHER_STATE],
    }.get(what, [])
    if what in ("stop", "drop-rng"):
        _require_none([name for name in readable if name not in names])
    if what == "drop-rng" and same_ranks:
        return catalog, ()
    dropped = [DroppedState(name, kinds[name], tuple(states[name])) for name in names]
    rest = drop_names(catalog, _own_names(states, names))
    agreed = list(_list_agreed(rest, names))
    dropped += (DroppedState(name, RANDOM_STATE, ()) for name in agreed)
    return drop_names(rest, agreed), tuple(dropped)


def rank_state_notes(
    dropped: Iterable[DroppedState], rest: Catalog, mesh: Mesh, source: Catalog
) -> list[str]:
    """Return a note for each kind of dropped state: how many, of which ranks, and their names.

    And one of kept positions in the data, from which no other number of ranks goes on.
    """
    kinds: dict[str, list[DroppedState]] = {}
    for state in dropped:
        kinds.setdefault(state.kind, []).append(state)
    notes = []
    for kind, states in kinds.items():
        of = ranges(sorted({rank for state in states for rank in state.ranks}))
        names = list_some([state.name for state in states])
        notes.append(f"dropped {plural(len(states), kind)} of the source's ranks {of}: {names}")
    positions, degree = loader_ranks(rest.objects)
    if positions and mesh.shape != (source.mesh.shape if source.mesh else (source.world_size,)):
        note = f"dataloader: positions of {plural(degree, 'data-parallel rank')}: with more or"
        note += " fewer, torchtitan resumes only without them (exclude_from_loading)"
        notes.append(note)
    return notes


def _list_states(catalog: Catalog) -> _States:
    """Return each rank's entry under a name, or why it cannot be read."""
    states: dict[str, dict[int, _Entry]] = {}
    kinds: tuple[Mapping[str, _Entry], ...] = (catalog.tensors, catalog.objects, catalog.conflicts)
    for entries in kinds:
        for full_name, entry in entries.items():
            if match := _OWN_NAME.fullmatch(full_name):
                states.setdefault(match["name"], {})[int(match["rank"])] = entry
    return states


def _with_rank_step(entry: AnyEntry) -> AnyEntry:
    """Return an entry of a DCP folder whose path ends in a rank as that rank's own entry.

    Such folders have the names of ``convert --per-rank`` as keys.
    """
    match = _OWN_NAME.fullmatch(entry.path[-1]) if _ends_in_text(entry.path) else None
    if match is None:
        return entry
    step = RankStep(match["name"], int(match["rank"]))
    return replace(entry, path=(*entry.path[:-1], step))


def _ends_in_text(path: Path) -> bool:
    return bool(path) and isinstance(path[-1], str)


def _is_refused(entry: _Entry) -> bool:
    return isinstance(entry, str)


def _own_names(states: _States, names: Iterable[str]) -> list[str]:
    return [f"{name}@rank{rank}" for name in names for rank in states[name]]


def _require_none(names: list[str]) -> None:
    verb = "differs" if len(names) == 1 else "differ"
    if names:
        raise Unsupported(
            f"{plural(len(names), 'value')} of the source {verb} between ranks: {list_some(names)}",
            hint="--rank-state drop excludes them, keep keeps each as NAME@rankR, 0 uses rank"
            " 0's for all",
        )


def _take_rank(
    catalog: Catalog, states: _States, rank: int
) -> tuple[Catalog, tuple[DroppedState, ...]]:
    """Return the catalog with one rank's state for all, and the names that the rank lacks."""
    names = {f"{name}@rank{rank}" for name, ranks in states.items() if rank in ranks}
    if not names:
        raise UsageError(
            f"--rank-state {rank}: no state of that rank",
            hint=f"{', '.join(WORDS)}, or a rank of the source",
        )
    rest = drop_names(catalog, set(_own_names(states, states)) - names)
    lacking = {name: ranks for name, ranks in states.items() if rank not in ranks}
    dropped = (DroppedState(n, _kind(n, ranks), tuple(ranks)) for n, ranks in lacking.items())
    return without_rank(rest, names), tuple(dropped)


# What kind of state it is


def _kind(name: str, entries: Mapping[int, _Entry]) -> str:
    """Return the kind of the ranks' entries under one name."""
    values = {rank: e.value for rank, e in entries.items() if isinstance(e, ObjectEntry)}
    if len(values) == len(entries):
        if all(type(value) is int and value == rank for rank, value in values.items()):
            return OWN_NUMBER
        if all(map(_is_generator, values.values())):
            return RANDOM_STATE
    return RANDOM_STATE if _random_head(name) else OTHER_STATE


def _is_generator(value: object) -> bool:
    """Return whether a value is a result of ``random.getstate`` or ``numpy.random.get_state``."""
    if not isinstance(value, tuple | list) or len(value) < 3:
        return False
    version, words = value[:2]
    return version == "MT19937" or (
        version in (2, 3) and isinstance(words, tuple | list) and len(words) == _PYTHON_WORDS
    )


def _random_head(name: str) -> str | None:
    """Return a name up to the step that names a random number generator; None if there is none.

    A generator inside a model or an optimizer may be part of it.
    """
    steps = name.split(".")
    of_a_part = state_category_of_name(name, tuple(steps)) != "other"
    for end, step in enumerate(steps[:1] if of_a_part else steps, 1):
        if re.fullmatch(RANDOM, step):
            return ".".join(steps[:end])
    return None


def _list_agreed(catalog: Catalog, names: Iterable[str]) -> Iterator[str]:
    """Yield the generators that ranks agree on, beside those of other ``names`` that are dropped.

    verl restores all of them or none. A number beside them, such as accelerate's step, is kept.
    """
    heads = tuple({f"{head}." for head in map(_random_head, names) if head})
    numbers = {n for n, entry in catalog.objects.items() if isinstance(entry.value, int | float)}
    for name in (*catalog.tensors, *catalog.objects):
        if name.startswith(heads) and name not in numbers:
            yield name
