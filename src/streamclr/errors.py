"""The one exception for what a user can put right; the command line prints it as one line and exits 2."""


class UserError(ValueError):
    """Names the value, what is allowed, and what to do about it."""
