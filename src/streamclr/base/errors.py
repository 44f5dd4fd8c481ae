"""What is told to a user in one line: the command line prints it and exits 2, or with a signal's code."""


class UserError(ValueError):
    """Names the value, what is allowed, and what to do about it."""


class NotFinite(UserError):
    """A loss, gradient or statistic that is infinite or no number; the step that met it has changed nothing."""


class LostRank(UserError):
    """Another process of the same job is no longer there."""


class QuietExit(Exception):
    """This rank of a job ends without a word: another speaks for all."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


class Stopped(Exception):
    """A signal asked the run to stop, and it has, after a checkpoint."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + number
