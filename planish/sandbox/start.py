"""Runs in the sandbox, before the program: sets the limits that the kernel keeps, then becomes the
program.

Whoever wanted the program may be dead already, too early for bubblewrap to have noticed: then
nobody reads what it prints, nobody would end it, and it does not begin.

    python -I -S start.py '{"RLIMIT_CPU": [4, 5], ...}' PYTHON ARGUMENT...
"""

import json
import os
import resource
import select
import sys

if __name__ == "__main__":
    limits, *command = sys.argv[1:]
    os.closerange(3, 1024)
    for name, (soft, hard) in json.loads(limits).items():
        kind = getattr(resource, name)
        _, most = resource.getrlimit(kind)
        most = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, most), most))
    reader = select.poll()
    reader.register(1, 0)
    if not reader.poll(0):
        os.execv(command[0], command)
