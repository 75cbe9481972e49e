"""Words and numbers for people: counts with their nouns, sizes, times, suggestions.

And patterns that files state, which anybody may have written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regex import Pattern

MOST_STEPS = 64
"""Steps of a name, between dots, of which each is looked at with all before or after it: a hostile
name has millions, and that takes the square of its length in memory, or hours.
"""
_DOZEN = 12
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def plural(count: int, noun: str) -> str:
    """Return ``1 file``, ``4 files``, ``3 boxes``, ``2 biases``."""
    ending = "" if count == 1 else "es" if noun.endswith(("x", "s")) else "s"
    return f"{count:,} {noun}{ending}"


def list_some(names: Collection[str], most: int = 8) -> str:
    """Return text such as ``a, b, c and 113 more``: the first names, and the number of others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(islice(names, most))}{more}"


def list_first(names: Sequence[str]) -> list[str]:
    """Return the first dozen of some names, and how many more there are."""
    rest = len(names) - _DOZEN
    return [*names[:_DOZEN], *([f"and {rest:,} more"] if rest > 0 else [])]


def list_lines(names: Sequence[str]) -> str:
    """List the first of some names, one a line, and how many more there are."""
    return "\n".join(f"  - {line}" for line in list_first(names))


def did_you_mean(word: str, words: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return a hint at the one of ``words`` most similar to a misspelled one, or ``otherwise``."""
    close = nearest(word, words)
    return otherwise if close is None else f"did you mean {close}?"


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of ``words`` most similar to a misspelled one, None if none is similar."""
    from difflib import get_close_matches  # only errors need it

    return next(iter(get_close_matches(word, list(words), n=1)), None)


def one_of(word: str, words: Collection[str]) -> str | None:
    """Return a hint at the one of ``words`` most similar to a misspelled one, or else at all."""
    return did_you_mean(word, words, f"one of {', '.join(words)}")


def duration(seconds: float) -> str:
    """Return ``12 s``, ``3 min 20 s``, ``30 min`` or ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s".removesuffix(" 0 s")
    return f"{whole // 3600:,} h {whole % 3600 // 60} min".removesuffix(" 0 min")


def duration_range(least: float, most: float) -> str:
    """Return ``2 to 5 min``, ``40 s to 2 min`` or ``2 to 3 h``: both in seconds, rounded."""
    (first, unit), (last, larger) = map(_round, (least, most))
    return f"{first}{'' if unit == larger else f' {unit}'} to {last} {larger}"


def _round(seconds: float) -> tuple[int, str]:
    """Return a time in its unit: to 5 s, or whole."""
    if seconds < 90:
        return max(5, 5 * round(seconds / 5)), "s"
    return (round(seconds / 60), "min") if seconds < 5400 else (round(seconds / 3600), "h")


def ranges(numbers: Iterable[int]) -> str:
    """Return ``0..3,7``: ascending numbers, runs of three or more as first and last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(
        f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which step-9 comes before step-10, however many digits there are."""
    parts = enumerate(re.split(r"([0-9]+)", name))
    numbers = ((part.lstrip("0") if at % 2 else part, at % 2) for at, part in parts)
    return [(0, len(part), part) if is_number else (1, 0, part) for part, is_number in numbers]


def visible(text: str) -> str:
    """Spell out control, direction and other unprintable characters of untrusted text."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def size(nbytes: int) -> str:
    """Return ``1.56 GiB``: three significant digits in units of 1024."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value, units = nbytes / 1024, list(_UNITS)
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{_three_digits(value)} {units[0]}"


def free(nbytes: int | None) -> str:
    """Return the text on a disk's free bytes, if there is a disk."""
    return "" if nbytes is None else f", {size(nbytes)} free"


def magnitude(count: int) -> str:
    """Return ``6.74 B``: a rounded count; small ones in full."""
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**4, "K")):
        if count >= limit:
            return f"{_three_digits(count / (1000 if unit == 'K' else limit))} {unit}"
    return f"{count:,}"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


_COUNT = re.compile(r"\{([0-9]+)")
_OTHERWISE = re.compile(r"\[:|\{(?!\d+(?:,\d*)?\}|,\d+\})|\(\?\w*x")
"""What ``regex`` reads as a class, a match with errors or a count with spaces, but not ``re``."""
_LARGEST = 1 << 19
"""Characters that take some seconds to compile."""


@lru_cache(maxsize=1 << 14)  # Python keeps 512, and a config may name each of more modules
def compile_stated(pattern: str) -> Pattern[str]:
    """Return a pattern that a file states; re.error if it is none, or not read as ``re`` does.

    Its ``match`` takes a ``timeout`` in seconds, as hostile ones never end: TimeoutError after it.
    """
    import regex

    try:
        if odd := _OTHERWISE.search(pattern):
            raise re.error("cannot be read as Python's re does", pattern, odd.start())
        if len(pattern) * prod(max(1.0, float(n)) for n in _COUNT.findall(pattern)) > _LARGEST:
            raise re.error("is too long, or repeats too much")  # each repetition is compiled
        re.compile(pattern)
        return regex.compile(pattern)
    except (regex.error, ValueError, OverflowError, RecursionError) as error:
        raise re.error(str(error)) from None
