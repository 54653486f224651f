"""Every error of the product, with its exit code and what to do about it.

Exit codes follow sysexits.h where it has one: 64 usage, 69 service unavailable, 70 software, 78
configuration. The units list 70 and 78 in RestartPreventExitStatus: neither gets better by trying again.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_DOCTOR_WARNINGS = 10
EXIT_DOCTOR_ERRORS = 11
"""How `glm53 doctor` ends when its worst finding is a warning, or an error. 20 and up: `glm53 fabric`."""

EXIT_BANDWIDTH_STALE = 12
EXIT_BANDWIDTH_LOW = 13
"""How `glm53 bandwidth` ends when a rail has the speed of a stale initialisation, or another one too low."""


class Glm53Error(Exception):
    """An error with an exit code and a hint; `str()` is the whole message for a person."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}\n  Fix: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class UsageError(Glm53Error):
    """The command line asks for something that does not exist."""

    exit_code = 64


class NotServingError(Glm53Error):
    """The pair is not serving (3 is what `systemctl status` says for an inactive unit)."""

    exit_code = 3


class ArtifactError(Glm53Error):
    """Files on disk are not what they should be, or cannot become it (65 is EX_DATAERR)."""

    exit_code = 65


class BusyError(Glm53Error):
    """Somebody else does this now, or the pair serves: later (75 is sysexits' EX_TEMPFAIL)."""

    exit_code = 75


class UnavailableError(Glm53Error):
    """Something this command needs does not answer: docker, the gate, the API."""

    exit_code = 69


class CommandError(UnavailableError):
    """A program ran and ended with `code`; `out` and `err` are what it said."""

    def __init__(self, message: str, *, code: int, out: str = "", err: str = "") -> None:
        super().__init__(message)
        self.code, self.out, self.err = code, out, err


class GaveUpError(Glm53Error):
    """The engine failed too often in too short a time; a person has to look."""

    exit_code = 70


class AuthError(Glm53Error):
    """A peer could not prove that it holds this cluster's token."""

    exit_code = 77


class ConfigError(Glm53Error):
    """Settings that cannot be used; `problems` has one line a fault, each naming the key."""

    exit_code = 78

    def __init__(self, source: str, problems: Sequence[str], *, hint: str = "") -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{source} cannot be used:\n{lines}", hint=hint)
