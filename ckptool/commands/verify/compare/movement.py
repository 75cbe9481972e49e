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
from ckptool.commands.verify.compare.matrices import Save
from ckptool.commands.verify.compare.samples import OTHER_PLACES, Samples
from ckptool.core.text import list_some
from ckptool.errors import Problem

_OF_TWO, _UNRELATED, _ZERO = "counts-differ", "weights-unrelated", "weight-zero"
_MOVED = 64
"""Elements that do not all return by chance to what they were, as few of 16 bits may."""
_TRAINED = 0.25
"""The share of a matrix's elements that move if it is trained, and not only rounded otherwise."""
_SETTLED, _APART, _FOREIGN = 0.9, 0.5, 0.1
"""Correlations of a matrix with the one a save before: if it moves little, if it has moved far, and
if it is none of its own.
"""
_ENOUGH = 1 << 8
"""Elements that are uncorrelated by no chance if they are another's."""
_LONGER = 4
"""Times as many steps may lie between two saves as between the two before."""
_ADAPTER = "lora"
"""In the names of what may be begun anew in the middle of a training, then all of it (ReLoRA)."""
_OWN = 2
"""How many parts of a name are a layer's own: ``up_proj.weight``."""
_FEW = 2


def movement_problems(save: Save, before: Sequence[Save]) -> Iterator[Problem]:
    """Yield the matrices of a save that are not of it, as those ``before`` tell, the last first."""
    if not before:
        return
    now = Samples(save)
    last, *older = (Samples(each, now.chosen) for each in before)
    names = [n for n in now.names if all(now.looks(n) == each.looks(n) for each in (last, *older))]
    moved = [n for n in names if now.count_differing(last, n) >= _MOVED]
    yield from _emptied(now, (last, *older), names)
    yield from _returned(now, last, older, moved)
    have_places = now.all_names == last.all_names  # other layers may have other numbers
    yield from _exchanged(now, last, older, names) if have_places else ()
    if older:
        are_trained = not save.weights.are_averages
        yield from _stood_still(now, last, older[0], names) if are_trained else ()
        yield from _unrelated(now, last, older[0], moved) if have_places else ()


def _emptied(now: Samples, before: Sequence[Samples], names: Sequence[str]) -> Iterator[Problem]:
    """Yield the matrices that are all zero, and were not in a save before.

    What begins as zeros may begin again, as adapters that were merged do. So may what moves, and no
    optimizer moves it, as a memory of what was seen.
    """
    weights, (last, *older) = now.save.weights, before
    zero = [n for n in names if now.is_zero(n) and not BEGINS_ZERO.search(n)]
    zero = [n for n in zero if n in weights.entries and weights.only([n]).are_zero]
    for each in before if zero else ():
        lost = [name for name in zero if not each.is_zero(name)]
        untrained = (name for name in lost if not now.save.may_be_trained(name))
        memories = {n for n in untrained if any(last.count_differing(e, n) for e in older)}
        if lost := [name for name in lost if name not in memories]:
            message = f"{list_some(lost, _FEW)}: all values are zero, which they are not in"
            yield Problem(f"{message} {each.name}", _ZERO, tensor=lost[0])
            return


def _returned(
    now: Samples, last: Samples, older: Iterable[Samples], moved: Sequence[str]
) -> Iterator[Problem]:
    """Yield the matrices that are those of an older save, though not all are, as if it was loaded.

    ``moved`` are those that are not of the last one. Zeros are of none.
    """
    for each in older:
        back = [n for n in moved if not (now.count_differing(each, n) or now.is_zero(n))]
        back = [name for name in back if now.is_that_of(each, name)]
        if 0 < len(back) < len(moved):
            message = (
                f"{list_some(back, _FEW)}: as in {each.name}, but not as in {last.name}, which"
            )
            yield Problem(f"{message} is newer: they are of two saves", _OF_TWO)


def _exchanged(
    now: Samples, last: Samples, older: Sequence[Samples], names: Sequence[str]
) -> Iterator[Problem]:
    """Yield the matrices that are like another one of the save before, and unlike their own.

    Unless they were so in that save, and are right now.
    """
    alike = defaultdict(list)
    for name in names:
        alike[now.looks(name)].append(name)
    for group in (group for group in alike.values() if len(group) > 1):
        unlike = [name for name in group if now.likeness(name, last) < _APART]
        for name, likeness, other in now.most_like(unlike, last, group) if unlike else ():
            is_one = likeness > _SETTLED and not _are_of_copies(name, other)
            if is_one and all(last.likeness(name, e) > _APART for e in older[:1]):
                message = f"{name}: has the values that {other} had in {last.name}"
                yield Problem(f"{message}: layers were mixed up", _UNRELATED, tensor=name)


def _in_any_module(name: str) -> Iterator[str]:
    """Yield a matrix's name for each module around it, without the name of that.

    Two modules may be of the same matrices, as ``qf`` and ``qf_target``: one of them may be made
    anew of the other, as what was the best, or what steps are compared with.
    """
    parts = name.split(".")
    modules = [*takewhile(lambda part: not part.isdecimal(), parts[:-_OWN])]
    for at in range(len(modules)):
        yield ".".join(("*" if here == at else part) for here, part in enumerate(parts))


def _are_of_copies(one: str, other: str) -> bool:
    return not {*_in_any_module(one)}.isdisjoint(_in_any_module(other))


def _copied(foreign: Iterable[str], now: Samples, last: Samples) -> Iterator[str]:
    """Yield the matrices that are like the same one of another module, of now or before."""
    alike: dict[str, set[str]] = defaultdict(set)
    for name in now.names & last.names:
        for key in _in_any_module(name):
            alike[key].add(name)
    for name in foreign:
        same = {each for key in _in_any_module(name) for each in alike[key]} - {name}
        same = {each for each in same if now.looks(each) == now.looks(name) == last.looks(each)}
        if any(now.likeness(name, save, each) > _APART for save in (now, last) for each in same):
            yield name


def _stood_still(
    now: Samples, last: Samples, older: Samples, names: Sequence[str]
) -> Iterator[Problem]:
    """Yield the matrices that were trained before and stand still, though their moments do not."""
    save, was = now.save, last.save
    still = [name for name in names if not now.count_differing(last, name)]
    still = [n for n in still if last.count_differing(older, n) >= _TRAINED * now.size(n)]
    if 2 * len(still) >= len(names) or save.some_stand_still(was):
        return
    still = [name for name in still if now.is_that_of(last, name)]
    shapes = {now.looks(name) for name in still}  # one may be taken for another of its shape
    known = {name: save.state_moved(was, name) for name in names if now.looks(name) in shapes}
    frozen = {now.looks(name) for name, moved in known.items() if moved is False}
    still = [name for name in still if known[name] and now.looks(name) not in frozen]
    still = [n for n in still if save.weights.only([n]).are_moved_by(save.least_step(was))]
    if still:
        message = f"{list_some(still, _FEW)}: as in {last.name}, but not what the optimizer keeps"
        yield Problem(f"{message} of it: they are of two saves", _OF_TWO)


def _unrelated(
    now: Samples, last: Samples, older: Samples, moved: Sequence[str]
) -> Iterator[Problem]:
    """Yield the matrices that are like nothing they were before, once they had settled.

    A sample may be of nothing but rows that were never trained, so it is not believed alone.
    """
    if not _follow_evenly(*(each.save.step.number for each in (now, last, older))):
        return
    saves = now.save, last.save, older.save
    adapters = {name for name in moved if _ADAPTER in name.lower()}
    if all(now.likeness(name, last) < _SETTLED for name in adapters):
        moved = [name for name in moved if name not in adapters]
    foreign = [name for name in moved if now.size(name) >= _ENOUGH]
    foreign = [name for name in foreign if _is_foreign(now, last, older, name)]
    copied = {*_copied(foreign, now, last)} if foreign else set()
    foreign = [name for name in foreign if name not in copied]
    for at in OTHER_PLACES if foreign else ():
        one, two, three = (Samples(save, foreign, at) for save in saves)
        foreign = [n for n in foreign if _is_foreign(one, two, three, n)]
    if foreign:
        message = f"{list_some(foreign, _FEW)}: like nothing that it was in {last.name} and"
        message += f" {older.name}: of another model, or made anew"
        yield Problem(message, _UNRELATED, tensor=foreign[0])


def _is_foreign(now: Samples, last: Samples, older: Samples, name: str) -> bool:
    is_settled = last.likeness(name, older) > _SETTLED
    return is_settled and now.is_finite(name) and abs(now.likeness(name, last)) < _FOREIGN


def _follow_evenly(now: int | None, last: int | None, older: int | None) -> bool:
    """Return whether about as many steps are between two saves as between the two before."""
    if now is None or last is None or older is None:
        return False
    return 0 < now - last <= _LONGER * (last - older)
