"""Programs of a model, run where a hostile one can do no harm; docs/sandbox.md says why that is so.

`Sandbox.run` runs a Python program; a `StdinTest` or `FunctionTest` runs one and compares what
comes out.
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
