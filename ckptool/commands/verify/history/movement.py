"""How a model's matrices moved from save to save, as samples of them show.

Training moves a matrix little from one save to the next, once it has settled, and never back to
what it was. So one that is, bit for bit, that of an older save is of that save, and so is one that
stands still while its moments move; one that is like nothing it was before is another's: another
layer's, another run's, or made anew. Nothing makes a whole matrix zero that was none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from ckptool.commands.verify.checks.meaning.weights import BEGINS_ZERO
from ckptool.commands.verify.history.matrices import ADAPTER
from ckptool.commands.verify.history.samples import OTHER_PLACES, Samples
from ckptool.commands.verify.history.saves import Save
from ckptool.core.text import list_some
from ckptool.errors import Problem

_OF_TWO, _UNRELATED, _ZERO = "counts-differ", "weights-unrelated", "weight-zero"
_MOVED = 64
"""Elements that do not all return by chance to what they were, as few of 16 bits may."""
_TRAINED = 0.25
"""The share of a matrix's elements that move if it is trained, and not only rounded otherwise."""
_SETTLED, _APART, _FOREIGN = 0.9, 0.5, 0.1
"""Correlations of a matrix with itself a save before: above if it moves little, below if it has
moved far, and below if it is another matrix.
"""
_ENOUGH = 1 << 8
"""Elements that are uncorrelated by no chance if they are another's."""
_LONGER = 4
"""Times as many steps may lie between two saves as between the two before."""
_OWN = 2
"""How many parts of a name are a layer's own: ``up_proj.weight``."""
_FEW = 2
_RECENT = 3
"""Saves in which a matrix was not zero: of what was made zero long ago, that is meant."""


def movement_problems(save: Save, predecessors: Sequence[Save]) -> Iterator[Problem]:
    """Yield the matrices that are not of a save, as its predecessors tell, the last one first."""
    if not predecessors:
        return
    now = Samples(save)
    past = [Samples(predecessor, now.chosen) for predecessor in predecessors]
    last, *older = past
    names = [n for n in now.names if all(now.looks(n) == samples.looks(n) for samples in past)]
    moved = [n for n in names if now.count_differing(last, n) >= _MOVED]
    yield from _check_zeros(now, past[:_RECENT], names)
    yield from _check_returns(now, last, older, moved)
    have_places = now.all_names == last.all_names  # other layers may have other numbers
    yield from _check_exchanges(now, last, older, names) if have_places else ()
    if older:
        are_trained = not save.has_averages
        yield from _check_standstill(now, last, older[0], names) if are_trained else ()
        yield from _check_foreign(now, last, older[0], moved) if have_places else ()


def _check_zeros(now: Samples, past: Sequence[Samples], names: Sequence[str]) -> Iterator[Problem]:
    """Yield the matrices that are all zero, and were not in an earlier save.

    What begins as zeros may begin again, as adapters do that were merged. So may a memory of what a
    model saw: a matrix that moves, though no optimizer moves it.
    """
    weights, (last, *older) = now.save.weights, past
    zeros = [n for n in names if now.is_zero(n) and not BEGINS_ZERO.search(n)]
    zeros = [n for n in zeros if n in weights.entries and weights.only([n]).are_zero]
    for samples in past if zeros else ():
        matrices = [name for name in zeros if not samples.is_zero(name)]
        untrained = (name for name in matrices if not now.save.may_be_trained(name))
        memories = {n for n in untrained if any(last.count_differing(old, n) for old in older)}
        if matrices := [name for name in matrices if name not in memories]:
            message = f"{list_some(matrices, _FEW)}: all values are zero, which they are not in"
            yield Problem(f"{message} {samples.save.name}", _ZERO, tensor=matrices[0])
            return


def _check_returns(
    now: Samples, last: Samples, older: Iterable[Samples], moved: Sequence[str]
) -> Iterator[Problem]:
    """Yield the matrices that are bit for bit those of an older save, unless all that moved are.

    ``moved`` are those that differ from the last save. Zeros may be of any save.
    """
    for samples in older:
        matrices = [n for n in moved if not (now.count_differing(samples, n) or now.is_zero(n))]
        matrices = [name for name in matrices if now.is_equal_in(samples, name)]
        if 0 < len(matrices) < len(moved):
            message = f"{list_some(matrices, _FEW)}: as in {samples.save.name}, but not as in"
            message += f" {last.save.name}, which is newer"
            yield Problem(f"{message}: they are of two saves", _OF_TWO)


def _check_exchanges(
    now: Samples, last: Samples, older: Sequence[Samples], names: Sequence[str]
) -> Iterator[Problem]:
    """Yield the matrices that are like another one of the last save, and unlike what they were.

    If they were exchanged in that save, and are back in place now, they are not meant.
    """
    groups = defaultdict(list)
    for name in names:
        groups[now.looks(name)].append(name)
    for group in (group for group in groups.values() if len(group) > 1):
        strangers = [name for name in group if now.likeness(name, last) < _APART]
        for name, likeness, other in now.most_like(strangers, last, group) if strangers else ():
            is_other = likeness > _SETTLED and not _are_of_copies(name, other)
            if is_other and all(last.likeness(name, old) > _APART for old in older[:1]):
                message = f"{name}: has the values that {other} had in {last.save.name}"
                yield Problem(f"{message}: layers were mixed up", _UNRELATED, tensor=name)


def _in_any_module(name: str) -> Iterator[str]:
    """Yield a matrix's name with ``*`` instead of a module's, for each module around it.

    Two modules may have the same matrices, as ``qf`` and ``qf_target``: one of them may be copied
    from the other, such as the best model, or the one that steps are compared with.
    """
    parts = name.split(".")
    modules = [*takewhile(lambda part: not part.isdecimal(), parts[:-_OWN])]
    for at in range(len(modules)):
        yield ".".join(("*" if index == at else part) for index, part in enumerate(parts))


def _are_of_copies(one: str, other: str) -> bool:
    return not {*_in_any_module(one)}.isdisjoint(_in_any_module(other))


def _copies(foreign: Iterable[str], now: Samples, last: Samples) -> Iterator[str]:
    """Yield the matrices that are like their twin in another module, in this or the last save."""
    groups: dict[str, set[str]] = defaultdict(set)
    for name in now.names & last.names:
        for key in _in_any_module(name):
            groups[key].add(name)
    for name in foreign:
        twins = {twin for key in _in_any_module(name) for twin in groups[key]} - {name}
        twins = {twin for twin in twins if now.looks(twin) == now.looks(name) == last.looks(twin)}
        if any(now.likeness(name, save, twin) > _APART for save in (now, last) for twin in twins):
            yield name


def _check_standstill(
    now: Samples, last: Samples, older: Samples, names: Sequence[str]
) -> Iterator[Problem]:
    """Yield the matrices that were trained before and stand still, though their moments do not."""
    save, predecessor = now.save, last.save
    matrices = [name for name in names if not now.count_differing(last, name)]
    matrices = [n for n in matrices if last.count_differing(older, n) >= _TRAINED * now.size(n)]
    if len(matrices) == len(names) or save.has_frozen_group(predecessor):
        return
    matrices = [name for name in matrices if now.is_equal_in(last, name)]
    shapes = {now.looks(name) for name in matrices}  # one may be taken for another of its shape
    moves = {n: save.state_moved(predecessor, n) for n in names if now.looks(n) in shapes}
    frozen = {now.looks(name) for name, moved in moves.items() if moved is False}
    matrices = [name for name in matrices if moves[name] and now.looks(name) not in frozen]
    matrices = [name for name in matrices if save.moves(predecessor, [name])]
    if matrices:
        message = f"{list_some(matrices, _FEW)}: as in {last.save.name}, but not what the optimizer"
        yield Problem(f"{message} keeps of it: they are of two saves", _OF_TWO)


def _check_foreign(
    now: Samples, last: Samples, older: Samples, moved: Sequence[str]
) -> Iterator[Problem]:
    """Yield the matrices that are like nothing they were before, once they had settled.

    A sample may be of nothing but rows that were never trained, so other places are read, too. A
    training that goes on from another's save has the optimizer of that, as after an exploit of
    population-based training; one that began again may have come to the last save, but not to this
    one, which is then the older.
    """
    if not _follow_evenly(*(samples.save.step.number for samples in (now, last, older))):
        return
    saves = now.save, last.save, older.save
    adapters = {name for name in moved if ADAPTER in name.lower()}
    # ReLoRA merges them in the middle of a training, and begins all of them anew
    if all(now.likeness(name, last) < _SETTLED for name in adapters):
        moved = [name for name in moved if name not in adapters]
    foreign = [name for name in moved if now.size(name) >= _ENOUGH]
    foreign = [name for name in foreign if _is_foreign(now, last, older, name)]
    copied = {*_copies(foreign, now, last)} if foreign else set()
    foreign = [name for name in foreign if name not in copied]
    for at in OTHER_PLACES if foreign else ():
        one, two, three = (Samples(save, foreign, at) for save in saves)
        foreign = [n for n in foreign if _is_foreign(one, two, three, n)]
    if foreign and not (last.save.was_written_after(now.save) or _has_another_optimizer(*saves)):
        message = f"{list_some(foreign, _FEW)}: like nothing that it was in {last.save.name} and"
        message += f" {older.save.name}: of another model, or made anew"
        yield Problem(message, _UNRELATED, tensor=foreign[0])


def _has_another_optimizer(now: Save, last: Save, older: Save) -> bool:
    """Return whether most means of squares that had settled are like nothing they were, too.

    Their steps must have gone on, or training was begun again.
    """
    if not _follow_evenly(*(int(save.most_steps_taken) or None for save in (now, last, older))):
        return False
    samples = Samples(now, matrices=now.squares)
    past = [Samples(save, samples.chosen, matrices=save.squares) for save in (last, older)]
    names = [n for n in samples.names if all(samples.looks(n) == old.looks(n) for old in past)]
    settled = [name for name in names if past[0].likeness(name, past[1]) > _APART]
    foreign = [n for n in settled if abs(samples.likeness(n, past[0])) < _FOREIGN]
    return 2 * len(foreign) > len(settled)


def _is_foreign(now: Samples, last: Samples, older: Samples, name: str) -> bool:
    is_settled = last.likeness(name, older) > _SETTLED
    return is_settled and now.is_finite(name) and abs(now.likeness(name, last)) < _FOREIGN


def _follow_evenly(now: int | None, last: int | None, older: int | None) -> bool:
    """Return whether about as many steps are between two saves as between the two before."""
    if now is None or last is None or older is None:
        return False
    return 0 < now - last <= _LONGER * (last - older)
