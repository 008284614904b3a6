"""The one exception for mistakes that the user can fix."""


class UserError(Exception):
    """Wrong input. The command line prints the message as one paragraph and exits with 2.

    The message names the file or key, the value given, the rule it breaks, and the fix.
    """
