"""The sandbox that all environments of a process share, so that its limit on concurrent programs
applies to all of them.

Builders of groups hold only the sandbox's limits, which can be pickled. So in a rollout process they
use the sandbox of that process.
"""

from functools import cache

from planish.sandbox import Limits, Sandbox


@cache
def process_sandbox(limits: Limits) -> Sandbox:
    """Return the sandbox of this process with these limits."""
    return Sandbox(limits)
