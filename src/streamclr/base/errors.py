"""Errors that the command line prints in one line; it exits with 2, or with the code of a signal."""


class UserError(ValueError):
    """A mistake that the user can correct: names the value, what is allowed and what to do.

    >>> from streamclr import Buffer, UserError
    >>> try:
    ...     Buffer(1)
    ... except UserError as error:
    ...     print(error)
    buffer is 1: use at least 2 images, one needs another to contrast with
    """


class NotFinite(UserError):
    """A loss, gradient or statistic is infinite or NaN; the step has been undone."""


class LostRank(UserError):
    """Another rank of this job has died or cannot be reached."""


class QuietExit(Exception):
    """This rank exits quietly; another rank reports the error."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


class Stopped(Exception):
    """A signal stopped the run, after a checkpoint."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + number
