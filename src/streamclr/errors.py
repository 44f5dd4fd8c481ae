"""The one exception for what a user can put right; the command line prints it as one line and exits 2."""


class UserError(ValueError):
    """Names the value, what is allowed, and what to do about it."""


class NotFinite(UserError):
    """A loss, gradient or statistic that is infinite or no number; the step that met it has changed nothing."""
