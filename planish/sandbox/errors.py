"""Errors of the sandbox itself. A program that fails in the sandbox is a result, not an error."""

from planish.errors import PlanishError, UserError


class SandboxUnavailableError(UserError):
    """This machine lacks something that the sandbox needs. The message says what to install or
    allow. No program was run.
    """


class SandboxError(PlanishError):
    """The sandbox itself failed, so the program's result is unknown."""
