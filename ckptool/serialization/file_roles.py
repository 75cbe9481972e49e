"""What files and folders of a training run are for, by the words in their names: one row a role.

Contents say more, but only of what is there and was opened. Names say what is missing, what is to
be opened, and which of several files are one save.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

from msgspec import Struct

_NOTHING = r"(?!)"


class Role(Struct, frozen=True, dict=True):
    """What a file is for, by whole ``words`` of its name, or by what is ``within`` it.

    Without its words a name is equal to those of the same files of other steps: they tell no run,
    fold or date. ``extra_words`` say the role, too, and stay in the name. Both may say that a file
    lies ``beside`` a model, so that no step is called after it, or is ``state`` of training,
    without a model: an upscaler is a model. ``empty`` is what may have no tensors, or be a number
    in a text.
    """

    name: str | None
    words: str = _NOTHING
    within: str = _NOTHING
    extra_words: str = _NOTHING
    beside: bool = False
    state: bool = False
    empty: bool = False

    @cached_property
    def worded(self) -> re.Pattern[str]:
        """The pattern of names in small letters, which takes a third to compile, with its words."""
        return re.compile(_whole(f"{self.words}|{self.extra_words}"))

    @cached_property
    def loose(self) -> re.Pattern[str]:
        """The pattern of names in small letters that say it by what is within them."""
        return re.compile(self.within)

    def is_said_by(self, name: str) -> bool:
        """Return whether a name in small letters says it, in any way."""
        return self.worded.search(name) is not None or self.loose.search(name) is not None


def _whole(words: str) -> str:
    return rf"(?<![a-z])(?:{words})(?![a-z])"


_OPTIMIZERS = "adamopt(?:im(?:izer)?)?(?:[gd]|states?)?|opt(?:im(?:izer)?)?states?"
_SCHEDULERS = "(?:lr)?sched(?:uler)?(?:[gd]|states?)?"
_DOMAINS = "(?:[-_](?:a2?b?|b2?a?))?"
"""What CycleGAN's networks are for: ``G_A``, ``D_B``, ``netG_A2B``."""
_ROLES = (
    Role("optimizer", "opt(?:im(?:izer)?s?)?[gd]?", "optim", _OPTIMIZERS, beside=True, state=True),
    Role("optimizer", "adam", "adam", "adamw", beside=True),  # models may be called so, too
    Role(
        "scheduler", "sched|schedulers?", "sched", _SCHEDULERS, beside=True, state=True, empty=True
    ),
    Role("scaler", "scaler", "scaler", "(?:grad|loss)scaler", beside=True, state=True, empty=True),
    Role("rng", "rng", r"(?<![a-z])rng", "rngstates?", beside=True, state=True, empty=True),
    Role("rng", within="random|seed", empty=True),
    Role("record", "(?:train(?:er|ing)?|extra|client|global)_states?", beside=True, empty=True),
    Role("record", within=r"(?<![a-z])(?:common|progress|meta)", empty=True),
    Role("dataloader", "data|(?:data)?loader", "sampler|loader|dl_state", beside=True, empty=True),
    Role("rank", r"(?:mp_|tp_|pp_|dp_|ep_)?rank[-_]?\d+", "rank"),
    Role("model", r"critic|ema(?:[-_]?\d+\.\d+)?", beside=True),
    Role("model", "models?|weights|actor|policy|unet", "model|weights|adapter"),
    Role(
        None,
        rf"value|reward|ref|dis|disc|discriminator|(?:net)?d{_DOMAINS}|do",
        extra_words="swa|ewma|polyak|avg|averaged?",
        beside=True,
    ),
    Role(
        None,
        "module|net|network|weight|params?|masters?|student|teacher|vae|transformer|controlnet"
        "|encoder|decoder|backbone|head|classifier|gen|generator|lora"
        rf"|(?:net)?g{_DOMAINS}",
        extra_words="enc|dec",
    ),
    Role(None, "amp|trainer|train|training|extra|states?|dict", empty=True),
)
"""The first row that a name matches says its role. The last rows say none: parts of a model may be
saved once, and a state may be of anything."""

WORDS = "(?i)" + _whole("|".join(row.words for row in _ROLES))
"""What is one of several files or folders of one step."""


@lru_cache(1 << 14)
def _rows_of(name: str) -> Sequence[Role]:
    small = name.lower()
    return [row for row in _ROLES if row.is_said_by(small)]


def _worded_rows_of(name: str) -> Iterator[Role]:
    return (row for row in _rows_of(name) if row.worded.search(name.lower()))


def role_of(name: str) -> str | None:
    """Return what a file is for, by its name; None if that says nothing."""
    return next((row.name for row in _rows_of(name)), None)


def without_words(name: str) -> str:
    """Return what a name says besides what its file is for: of which save or run it is."""
    return re.sub(r"[-_.]+", "-", re.sub(WORDS, "", name)).strip("-")


def is_beside_model(name: str) -> bool:
    """Return whether a name is that of what lies beside a model."""
    return any(row.beside for row in _worded_rows_of(name))


def is_of_training(name: str) -> bool:
    """Return whether a name is that of an optimizer, a scheduler or random states."""
    return any(row.state for row in _worded_rows_of(name))


def may_be_empty(name: str) -> bool:
    """Return whether a file may have no tensors: no word says model, optimizer or average."""
    return all(row.empty for row in _rows_of(name))
