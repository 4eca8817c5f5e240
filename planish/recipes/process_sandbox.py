"""The sandbox of this process, for environments: all of them share its bound on programs that run
at once.

An environment carries limits, which pickle, and asks here; so a builder of groups that is sent to
another process finds the sandbox of that process.
"""

from functools import cache

from planish.sandbox import Limits, Sandbox


@cache
def process_sandbox(limits: Limits) -> Sandbox:
    return Sandbox(limits)
