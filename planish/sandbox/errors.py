"""What can go wrong with the sandbox itself. That a program fails in it is no error but a result."""

from planish.errors import PlanishError, UserError


class SandboxUnavailableError(UserError):
    """This machine lacks something that the sandbox needs; the message says what to install or to
    allow. Nothing was run.
    """


class SandboxError(PlanishError):
    """The sandbox itself failed, and nothing is known about the program."""
