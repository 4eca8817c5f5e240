"""Run model-written programs in isolation, so that a hostile one can do no harm.

`Sandbox.run` runs a Python program. A `StdinTest` or `FunctionTest` runs a program and compares its
output or return value with the expected one. docs/reference/sandbox.md explains the isolation.
"""

from planish.sandbox.errors import SandboxError, SandboxUnavailableError
from planish.sandbox.limits import Limits
from planish.sandbox.process import Ending
from planish.sandbox.program_tests import FunctionTest, Outcome, ProgramTest, StdinTest, TestResult
from planish.sandbox.sandbox import Execution, Sandbox

__all__ = [
    "Ending",
    "Execution",
    "FunctionTest",
    "Limits",
    "Outcome",
    "ProgramTest",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailableError",
    "StdinTest",
    "TestResult",
]
