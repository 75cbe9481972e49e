"""What a code of verify is: how severe, what it means, and the next step."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Severity(Enum):
    """``error`` fails, ``warning`` fails with --strict, ``info`` only informs."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Code(NamedTuple):
    """The severity of a code, what it means, and the next step."""

    severity: Severity
    meaning: str
    hint: str | None = None


AGAIN = "use another copy of the file, or the previous checkpoint"
MIXED = "the save was interrupted, or files were lost or mixed with those of another save"
