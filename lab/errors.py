"""The lab's errors: each says what was found, what was expected and what to do."""


class LabError(Exception):
    """A lab verb cannot be done; `str(error)` is the whole message, `exit_code` the command's exit code."""

    exit_code = 1


class UsageError(LabError):
    """The verb or an argument of it is wrong; nothing was touched."""

    exit_code = 2


class CommandError(LabError):
    """A program that the lab ran failed; `returncode` is its exit code (128 + n for signal n)."""

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode
