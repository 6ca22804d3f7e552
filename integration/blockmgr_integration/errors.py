"""What the commands answer with one line instead of a traceback."""


class BadInput(Exception):
    """A value that a command cannot work with; one line that names it and the limit."""
