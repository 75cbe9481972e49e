"""Which names belong to a parameter: ``model.W``, ``optimizer.state.W.exp_avg`` for one ``W``.

A frame is what stands before and after a parameter's name. All names of one frame are renamed
together, as the parameters themselves are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from ckptool.core.catalog import Catalog
from ckptool.core.parts import part_of

_MOST_WRAPPERS = 3
"""As in ``model.module.module.``, of a model that is wrapped twice."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around parameters' names, dots included, and which part it is."""

    prefix: str
    suffix: str = ""
    part: str = "model"

    def inner(self, name: str) -> str | None:
        """The parameter's name within ``name``, or None where the frame does not fit."""
        if len(name) <= len(self.prefix) + len(self.suffix):
            return None
        if not name.startswith(self.prefix) or not name.endswith(self.suffix):
            return None
        return name[len(self.prefix) : len(name) - len(self.suffix)]

    def around(self, inner: str) -> str:
        """The name of a parameter in this frame."""
        return f"{self.prefix}{inner}{self.suffix}"


Framed = dict[Frame, dict[str, str]]
"""For each frame: parameter's name -> whole name."""


Known = Callable[[str], bool]
"""Whether a map's rules take a parameter's name."""


def framed(catalog: Catalog, known: Known, known_state: Known) -> tuple[Framed, list[str]]:
    """Every name that holds a parameter's, by frame, and the model's names that hold none.

    ``known`` tells the names of the model's parameters, ``known_state`` those of an optimizer's.
    """
    model, others = _by_part(catalog)
    found: Framed = {frame: {} for frame in _model_frames(model, known)}
    odd = []
    for name in model:
        spot = next(((f, i) for f in found if known(i := f.inner(name) or "")), None)
        if spot is None:
            odd.append(name)
        else:
            found[spot[0]][spot[1]] = name
    parameters = {inner for names in found.values() for inner in names}
    unframed = _state_frames(others, parameters, found)
    for name in unframed:
        for frame, names in found.items():
            inner = frame.inner(name) if frame.part != "model" else None
            if inner is not None and known_state(inner):
                names[inner] = name
                break
    return found, odd


def _by_part(catalog: Catalog) -> tuple[list[str], list[str]]:
    model = [n for n, e in catalog.tensors.items() if part_of(e) == "model"]
    mine = set(model)
    others = [n for n in catalog.tensors if n not in mine]
    return model, [*others, *catalog.objects]


def _model_frames(names: Iterable[str], known: Known) -> list[Frame]:
    """The wrappers that parameters' names lie in, such as none, ``model.`` or ``ema.``."""
    counts = Counter(prefix for name in names for prefix in _wrapper(name, known))
    most = max(counts.values(), default=0)
    found = [Frame(prefix) for prefix, count in counts.items() if 2 * count >= most]
    return found or [Frame("")]


def _wrapper(name: str, known: Known) -> Iterator[str]:
    """The shortest beginning of a name that is followed by a parameter's name."""
    for inner in unwrapped(name):
        if known(inner):
            yield name[: len(name) - len(inner)]
            return


def unwrapped(name: str) -> Iterator[str]:
    """The name, and what it is without the first of its parts, as a wrapper may add them."""
    steps = name.split(".")
    for count in range(min(_MOST_WRAPPERS + 1, len(steps))):
        yield ".".join(steps[count:])


def _state_frames(names: Iterable[str], parameters: Collection[str], found: Framed) -> list[str]:
    """Put names around parameters' names into frames, made as needed; returns those around none."""
    frames = [frame for frame in found if frame.part != "model"]
    left = []
    for name in names:
        frame = next((f for f in frames if f.inner(name) in parameters), None)
        if frame is None:
            frame = _around_parameter(name, parameters)
            if frame is None:
                left.append(name)
                continue
            frames.append(frame)
            found[frame] = {}
        found[frame][frame.inner(name) or ""] = name
    return left


def _around_parameter(name: str, parameters: Collection[str]) -> Frame | None:
    """The frame of the longest parameter's name within a name."""
    steps = name.split(".")
    for length in range(len(steps), 0, -1):
        for start in range(len(steps) - length + 1):
            if ".".join(steps[start : start + length]) in parameters:
                before, after = steps[:start], steps[start + length :]
                prefix = "".join(f"{step}." for step in before)
                return Frame(prefix, "".join(f".{s}" for s in after), "optimizer")
    return None
