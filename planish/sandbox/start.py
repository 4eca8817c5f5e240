"""Runs in the sandbox before the program: sets the resource limits, then executes the program.

If the planish process has already died, nothing would read the program's output or kill the program
at its time limit. So start.py then exits without running the program. bubblewrap alone does not
cover this case, because it may start too late to notice the death of its parent.

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
        resource_id = getattr(resource, name)
        _, current_hard = resource.getrlimit(resource_id)
        if current_hard != resource.RLIM_INFINITY:
            hard = min(hard, current_hard)
        resource.setrlimit(resource_id, (min(soft, hard), hard))
    # Standard output is a pipe to planish. With an empty event mask, poll reports only its closing.
    reader = select.poll()
    reader.register(1, 0)
    if not reader.poll(0):
        os.execv(command[0], command)
