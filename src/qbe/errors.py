"""The one exception a user sees: a clear line that says what, where and what to do."""


class QBEError(Exception):
    """Bad input or a refused request. The command line prints the message alone and exits with code 2.

    The message is one line: what is wrong, where, and what to do about it.
    """
