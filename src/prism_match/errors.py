"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """A mistake of the user's: one line that names the thing and the reason. The command line shows
    it without a traceback and exits with code 2."""
