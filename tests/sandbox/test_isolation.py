"""What every program of a sandbox gets. test_hostile_programs.py has programs that try for more."""

import asyncio
import json

from planish.sandbox.command import ENVIRONMENT, resource_limits
from planish.sandbox.limits import Limits

REPORT = """
import json, os, resource
limits = {name: resource.getrlimit(getattr(resource, name)) for name in %r}
print(json.dumps([dict(os.environ), limits, os.getuid()]))
"""


def test_a_program_has_its_own_environment_and_user_and_all_limits(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    wanted = resource_limits(Limits())
    names = sorted(
        [
            "AS",
            "CORE",
            "CPU",
            "FSIZE",
            "MEMLOCK",
            "MSGQUEUE",
            "NOFILE",
            "NPROC",
            "SIGPENDING",
            "STACK",
        ]
    )
    done = asyncio.run(sandbox().run(REPORT % ([f"RLIMIT_{name}" for name in names],)))
    assert done.exit_code == 0, done.stderr
    environment, limits, user = json.loads(done.stdout)
    assert environment == {**ENVIRONMENT, "PWD": "/program"}
    assert set(wanted) == set(limits)
    assert all(soft <= wanted[name][0] for name, (soft, _) in limits.items())
    assert user == 1000
