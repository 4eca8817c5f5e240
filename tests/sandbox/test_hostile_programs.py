"""Programs that try to escape, to outlive their limits, to exhaust resources, or to fake a correct
answer.
"""

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from planish.sandbox import Ending, FunctionTest, Outcome, StdinTest
from planish.sandbox.limits import MAX_THREADS, MIB

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(sandbox, source, **options):
    return asyncio.run(sandbox.run(source, **options))


def said(sandbox, source, **options):
    """Return the printed JSON of the program, which must have ended by itself."""
    done = run(sandbox, source, **options)
    assert done.ending is Ending.EXITED, done
    assert done.exit_code == 0, done.stderr.decode()
    return json.loads(done.stdout)


ATTEMPT = """
import json
def got(attempt):
    try:
        return repr(attempt())
    except BaseException as error:
        return type(error).__name__
"""


def attempts(sandbox, expressions, **options):
    lines = [
        ATTEMPT,
        "import ctypes, os, socket, subprocess, sys, threading",
        "C = ctypes.CDLL(None)",
    ]
    lines.append(f"print(json.dumps([{', '.join(f'got(lambda: {one})' for one in expressions)}]))")
    return said(sandbox, "\n".join(lines), **options)


def processes_with(mark):
    """Return the processes of this machine whose command line contains the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:  # it has just ended
                continue
    return found


# What it can reach


def test_the_network_is_not_there(sandbox):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    name = f"\0planish-test-{os.getpid()}"
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(name)
    abstract.listen()
    with listener, abstract:
        results = attempts(
            sandbox(),
            [
                f"socket.create_connection(('127.0.0.1', {port}), 2)",
                "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
                f"socket.socket(socket.AF_UNIX).connect({name!r})",
                "socket.getaddrinfo('example.com', 80)",
                "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
                "socket.socketpair()",
            ],
        )
    assert set(results) <= {"PermissionError", "gaierror"}


def test_files_of_the_host_are_not_there(sandbox, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    monkeypatch.setenv("PLANISH_TEST_SECRET", "sesame")
    paths = [
        "/etc/shadow",
        "/etc/passwd",
        "/root/.ssh",
        str(Path.home()),
        str(secret),
        str(ROOT),
        "/proc/1/environ",
    ]
    paths += [
        "/proc/self/status",
        f"/proc/{os.getpid()}/environ",
        "/sys",
        "/var",
        "/usr",
        "/bin/sh",
        "/dev/sda",
        "/dev/mem",
    ]
    results = attempts(sandbox(), [f"os.stat({path!r})" for path in paths])
    assert dict.fromkeys(paths, "FileNotFoundError") == dict(zip(paths, results, strict=True))


def test_all_that_can_be_read_is_python(sandbox, monkeypatch):
    monkeypatch.setenv("PLANISH_TEST_SECRET", "sesame")
    source = """
import json, os, sys
files = [os.path.join(d, f) for d, _, names in os.walk("/") for f in names]
outside = [f for f in files if not f.startswith((sys.prefix + "/", "/program/")) and f not in ("/start.py", "/dev/null")]
writable = [d for d, _, _ in os.walk("/") if os.access(d, os.W_OK)]
packages = [f for f in files if "-packages/" in f]
print(json.dumps([outside, writable, packages, sorted(os.environ), os.getcwd()]))
"""
    outside, writable, packages, variables, directory = said(sandbox(), source)
    # the dynamic linker
    assert all("ld-" in Path(path).name or "ld." in Path(path).name for path in outside), outside
    assert len(outside) <= 1
    assert writable == []
    assert packages == []
    assert "PLANISH_TEST_SECRET" not in variables
    assert {name for name in variables if not name.startswith("PYTHON")} == {
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "MALLOC_ARENA_MAX",
        "PWD",
    }
    assert directory == "/program"


def test_nothing_can_be_written(sandbox):
    places = [
        "/x",
        "/tmp/x",
        "/program/x",
        "/program/main.py",
        "/dev/x",
        "/python/x",
        "/start.py",
        "/dev/shm/x",
    ]
    results = attempts(
        sandbox(),
        [f"open({place!r}, 'w')" for place in places]
        + ["os.mkdir('/x')", "os.remove('/start.py')"],
    )
    assert set(results) <= {"OSError", "FileNotFoundError", "PermissionError"}, results


def test_privileged_system_calls_are_rejected(sandbox):
    results = attempts(
        sandbox(),
        [
            "os.setuid(0)",
            "os.chroot('/python')",
            "C.mount(b'x', b'/program', b'tmpfs', 0, None) or 'mounted'",
            "C.unshare(0x10000000) or 'a namespace'",
            "C.setns(0, 0) or 'a namespace'",
            "C.ptrace(16, 1, 0, 0) or 'attached'",
            "C.process_vm_readv(1, None, 0, None, 0, 0)",
            "C.syscall(248, b'user', b'x', b'y', 1, -3)",
            "C.syscall(319, b'x', 0)",
            "C.syscall(425, 8, None)",
            "C.shmget(0, 1 << 30, 0o1600)",
            "C.prctl(4, 1, 0, 0, 0)",
            "C.personality(0xffffffff)",
            "os.mknod('/x', 0o60666, 0x800)",
            "(os.getuid(), os.getgid(), os.getgroups())",
        ],
    )
    assert results[:2] == ["PermissionError", "OSError"]
    assert set(results[2:13]) == {"-1"}, results
    assert results[13:] == ["OSError", "(1000, 1000, [])"]


def test_limits_cannot_be_raised(sandbox):
    kinds = ["AS", "CPU", "NPROC", "NOFILE", "FSIZE", "CORE"]
    results = attempts(
        sandbox(),
        [
            f"__import__('resource').setrlimit(__import__('resource').RLIMIT_{kind}, (-1, -1)) or "
            "'raised'"
            for kind in kinds
        ],
    )
    assert set(results) == {"ValueError"}


def test_no_file_of_the_host_is_left_open(sandbox):
    with open(__file__) as file:
        os.set_inheritable(file.fileno(), True)
        source = """
import json, os
found = []
for number in range(1024):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(json.dumps(found))
"""
        assert said(sandbox(), source) == [0, 1, 2]


def test_no_setuid_program_gives_rights(sandbox):
    """The sandbox contains no such program."""
    results = attempts(
        sandbox(), ["os.execv('/bin/su', ['su'])", "os.execv('/usr/bin/sudo', ['sudo'])"]
    )
    assert set(results) == {"FileNotFoundError"}


# How it may stay, and whom it may hit

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


def test_a_fork_bomb_of_one_process_never_goes_off(sandbox):
    results = attempts(
        sandbox(),
        ["os.fork()", "os.posix_spawn(sys.executable, [sys.executable], {})", "C.vfork()"],
    )
    assert results[:2] == ["PermissionError", "PermissionError"]
    assert results[2] == "-1"


@pytest.mark.parametrize("processes", [1, 8])
def test_a_fork_bomb_is_over_in_time(sandbox, processes):
    began = time.monotonic()
    done = run(
        sandbox(processes=processes, memory_bytes=1024 * MIB, cpu_seconds=1, wall_seconds=2.0),
        FORK_BOMB,
    )
    assert done.ending in (Ending.CPU_TIME, Ending.WALL_TIME)
    assert time.monotonic() - began < 50


def test_processes_and_threads_are_counted(sandbox):
    source = """
import json, os, time
made = 0
for _ in range(100):
    try:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
    except OSError:
        break
print(json.dumps(made), flush=True)
os._exit(0)
"""
    assert said(sandbox(processes=5, memory_bytes=1024 * MIB), source) == 4
    threads = """
import json, threading, time
made = 0
for _ in range(1000):
    try:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        made += 1
    except RuntimeError:
        break
print(json.dumps(made), flush=True)
__import__("os")._exit(0)
"""
    assert said(sandbox(memory_bytes=2048 * MIB), threads) == MAX_THREADS - 1


@pytest.mark.parametrize(
    "leave",
    [
        "os.fork() or (os.setsid(), os.fork() or time.sleep(1000))",
        "os.fork() or (os.setsid(), [os.close(n) for n in range(3)], time.sleep(1000))",
        "os.fork() or (signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)), time.sleep(1000))",
    ],
)
def test_daemons_end_with_their_program(sandbox, leave):
    mark = f"left-behind-{time.time_ns()}"
    source = (
        f"import os, signal, time\n{leave}\nprint('done', flush=True)\ntime.sleep(0.2)\nos._exit(0)"
    )
    done = run(sandbox(processes=6, memory_bytes=1024 * MIB), source, arguments=[mark])
    assert done.ending is Ending.EXITED
    assert b"done" in done.stdout
    assert done.seconds < 50
    assert processes_with(mark) == []


def test_signals_reach_nobody_outside(sandbox):
    source = """
import json, os, signal, sys
sent = []
for pid in [os.getppid(), 1, -1, *range(3, 300), int(sys.argv[1])]:
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
            sent.append(pid)
        except OSError:
            pass
print(json.dumps([os.getpid(), os.getppid(), sent]))
"""
    pid, parent, sent = said(sandbox(), source, arguments=[str(os.getpid())])
    assert pid < 10
    assert parent in (0, 1)
    # 1 is bubblewrap's own process there, which no signal from within ends
    assert set(sent) <= {1, parent, -1}


def test_a_program_that_ignores_signals_ends(sandbox):
    source = (
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n  "
        "  except (OSError, ValueError): pass\n"
    )
    assert run(sandbox(wall_seconds=1.5), source + "time.sleep(1000)").ending is Ending.WALL_TIME
    done = run(sandbox(cpu_seconds=1, wall_seconds=60.0), source + "while True: pass")
    assert (done.ending, done.exit_code) == (Ending.CPU_TIME, 128 + 9)
    done = run(sandbox(cpu_seconds=40), "import os\nos.kill(os.getpid(), 9)")
    assert (done.ending, done.exit_code) == (Ending.EXITED, 128 + 9)


def test_loops_and_sleeps_end(sandbox):
    assert run(sandbox(cpu_seconds=1), "while True: pass").ending is Ending.CPU_TIME
    assert (
        run(sandbox(wall_seconds=1.0), "import time\ntime.sleep(1000)").ending is Ending.WALL_TIME
    )
    closed = "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(1000)"
    assert run(sandbox(wall_seconds=1.0), closed).ending is Ending.WALL_TIME
    assert (
        run(
            sandbox(wall_seconds=1.0), "input()\nimport time\ntime.sleep(1000)", stdin="x\n" * 10**6
        ).exit_code
        is None
    )


async def test_a_run_that_is_cancelled_leaves_nothing(sandbox):
    mark = f"cancelled-{time.time_ns()}"

    box = sandbox(processes=4, memory_bytes=1024 * MIB, wall_seconds=600.0)
    source = "import os, time\nos.fork()\nos.setsid() if os.getpid() % 2 else 0\ntime.sleep(1000)"
    task = asyncio.create_task(box.run(source, arguments=[mark]))
    async with asyncio.timeout(60):
        while len(processes_with(mark)) < 4:  # bubblewrap twice, and the program twice
            await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_with(mark) == []


RUN_FOR_EVER = """
import asyncio, sys
from planish.sandbox import Limits, Sandbox
box = Sandbox(Limits(processes=4, memory_bytes=1 << 30, wall_seconds=600.0))
program = "import os, time; os.fork(); os.setsid() if os.getpid() % 2 else 0; time.sleep(1000)"
asyncio.run(box.run(program, arguments=sys.argv[1:]))
"""


def test_a_caller_that_is_killed_leaves_nothing(sandbox):
    sandbox()
    mark = f"orphaned-{time.time_ns()}"
    caller = subprocess.Popen([sys.executable, "-c", RUN_FOR_EVER, mark], cwd=ROOT)
    try:
        # the caller, bubblewrap twice, the program twice
        wait_until(lambda: len(processes_with(mark)) >= 5, 60)
    finally:
        caller.kill()
        caller.wait()
    wait_until(lambda: processes_with(mark) == [], 60)


def wait_until(holds, seconds):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1])
async def test_a_run_may_be_cancelled_at_any_moment(sandbox, delay):
    mark = f"cancelled-early-{time.time_ns()}"
    logged = []

    asyncio.get_running_loop().set_exception_handler(lambda _, error: logged.append(error))
    task = asyncio.create_task(sandbox().run("import time\ntime.sleep(1000)", arguments=[mark]))
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()  # asyncio logs an error that was not retrieved when its task is collected
    assert processes_with(mark) == []
    assert logged == []


# How much it may take


def peak(sandbox, source, **options):
    """Return (largest resident memory of all sandbox processes together in bytes, the run). The
    memory is sampled.
    """
    mark = f"memory-{time.time_ns()}"
    sampled = [0]
    done = threading.Event()

    def watch():
        while not done.is_set():
            total = 0
            for pid in processes_with(mark):
                try:
                    total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
                        "SC_PAGE_SIZE"
                    )
                except (OSError, IndexError):
                    continue
            sampled[0] = max(sampled[0], total)
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return run(sandbox, source, arguments=[mark], **options), sampled
    finally:
        done.set()
        watcher.join()


def test_a_memory_bomb_ends_within_its_memory(sandbox):
    source = """
import time
held = []
try:
    while True: held.append(bytearray(1 << 20))
except MemoryError:
    time.sleep(4)  # in which the memory is sampled
    raise
"""
    done, most = peak(sandbox(memory_bytes=256 * MIB), source)
    assert done.exit_code == 1
    assert b"MemoryError" in done.stderr
    assert 100 * MIB < most[0] <= 256 * MIB


def test_many_processes_share_the_memory(sandbox):
    source = """
import os, time
for _ in range(3):
    try: os.fork()
    except OSError: pass
held = []
try:
    while True: held.append(bytearray(1 << 20))
except MemoryError:
    time.sleep(4)
"""
    done, most = peak(sandbox(processes=4, memory_bytes=512 * MIB), source)
    assert done.exit_code == 0
    assert 200 * MIB < most[0] <= 512 * MIB + 16 * MIB  # bubblewrap's own processes beside


@pytest.mark.parametrize(
    "take",
    [
        "import mmap\nheld = []\nwhile True: held.append(mmap.mmap(-1, 1 << 24))",
        "import mmap\nheld = []\nwhile True: held.append(mmap.mmap(-1, 1 << 24, "
        "flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))",
        "import os\nos.memfd_create('x')",
        "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) < 0: raise MemoryError",
        "x = 'a' * (1 << 40)",
        "x = 7 ** (10 ** 12)",
    ],
)
def test_other_ways_to_memory_are_closed(sandbox, take):
    done = run(sandbox(cpu_seconds=2, memory_bytes=256 * MIB), take)
    assert done.exit_code == 1 or done.ending is Ending.CPU_TIME, done


def test_deep_recursion_hurts_only_itself(sandbox):
    source = "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\n"
    done = run(sandbox(), source + "f(0)")
    assert done.ending is not Ending.EXITED or done.exit_code not in (0, None)
    nested = "import json\njson.loads('[' * 10**5)"
    assert run(sandbox(), nested).exit_code == 1
    crash = "import ctypes\nctypes.string_at(0)"
    assert run(sandbox(), crash).exit_code == 128 + 11


def test_output_is_held_to_its_limit(sandbox):
    for stream in ("stdout", "stderr"):
        done = run(
            sandbox(output_bytes=10000), f"import sys\nwhile True: sys.{stream}.write('x' * 1000)"
        )
        assert done.ending is Ending.OUTPUT
        assert len(getattr(done, stream)) == 10000
    just = run(sandbox(output_bytes=10000), "print('x' * 9999)")
    assert (just.ending, just.exit_code, len(just.stdout)) == (Ending.EXITED, 0, 10000)


def test_scratch_files_are_held_to_their_limit(sandbox):
    source = """
import json, os
written = 0
try:
    for number in range(100):
        with open(f"/tmp/{number}", "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 16)); file.flush(); written += 1 << 16
except OSError as error:
    print(json.dumps([written, error.strerror]))
"""
    box = sandbox(scratch_bytes=8 * MIB)
    written, why = said(box, source)
    assert 7 * MIB <= written <= 8 * MIB
    assert why == "No space left on device"
    big = (
        "f = open('big', 'wb')\ntry: f.truncate(1 << 40)\nexcept OSError as e: print('\"%s\"' % "
        "e.strerror)"
    )
    assert said(box, big) == "File too large"
    assert said(box, "import json, os\nprint(json.dumps([os.getcwd(), os.listdir('.')]))") == [
        "/tmp",
        [],
    ]


def test_links_lead_nowhere(sandbox, tmp_path):
    (tmp_path / "secret").write_text("sesame")
    source = f"""
import os
os.symlink({str(tmp_path / "secret")!r}, "link")
os.symlink("../" * 20 + "etc/shadow", "up")
os.symlink("/program/main.py", "own")
print(json.dumps([got(lambda: open("link").read()), got(lambda: open("up").read()), got(lambda: open("own", "w")),
                  got(lambda: os.link("/start.py", "hard"))]))
"""
    results = said(sandbox(scratch_bytes=MIB), ATTEMPT + source)
    assert results == ["FileNotFoundError", "FileNotFoundError", "OSError", "OSError"]


# How it may look right


def outcome(sandbox, test, source):
    return asyncio.run(test.run(sandbox, source)).outcome


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('passed')\nprint('{\"outcome\": \"passed\"}')",
        "print('{\"returned\": null}')",
        "raise SystemExit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "class Any:\n    def __eq__(self, other): return True\nprint(Any())",
    ],
)
def test_a_verdict_cannot_be_printed(sandbox, source):
    assert outcome(sandbox(), StdinTest("3", "6"), source) in (Outcome.WRONG, Outcome.FAILED)
    assert outcome(sandbox(), FunctionTest("f", [3], 6), source) in (Outcome.WRONG, Outcome.FAILED)


def test_a_value_that_equals_everything_is_no_answer(sandbox):
    everything = "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()"
    assert outcome(sandbox(), FunctionTest("f", [3], 6), everything) is Outcome.FAILED
    number = (
        "class Any(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return "
        "0\ndef f(x): return Any(7)"
    )
    assert outcome(sandbox(), FunctionTest("f", [3], 6), number) is Outcome.WRONG


def test_what_is_expected_is_nowhere_in_the_sandbox(sandbox):
    """The program looks at all frames, modules, objects, files, arguments and variables that it
    can reach. The number is too long to be found in an address by chance.
    """
    expected = 42 * 10**30
    search = """
import gc, inspect, os, sys
def f(x):
    seen = [repr(frame.frame.f_locals) + repr(sorted(frame.frame.f_globals)) for frame in inspect.stack()]
    seen += [repr(vars(module)) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    seen += [open("/program/" + name).read() for name in os.listdir("/program")] + [repr(os.environ), repr(sys.argv)]
    seen += [value for value in gc.get_objects() if isinstance(value, str)]
    return any(str(21 * 2 * 10**30) in text for text in seen) and "found" or x + 1
"""
    result = asyncio.run(FunctionTest("f", [1], expected).run(sandbox(), search))
    assert (result.outcome, result.answer) == (Outcome.WRONG, "2")


def test_tampering_with_the_caller_only_makes_another_answer(sandbox):
    tamper = """
import json, sys
main = sys.modules["__main__"]
main.plain = lambda value: None
json.dump = lambda value, file: file.write('{"returned": "passed", "outcome": "passed"}')
def f(x): return x
"""
    result = asyncio.run(FunctionTest("f", [1], 6).run(sandbox(), tamper))
    assert result.outcome is Outcome.WRONG
    huge = "import os\nos.write(3, b'[' * 900000)\ndef f(x): return x"
    assert outcome(sandbox(), FunctionTest("f", [1], 6), huge) is Outcome.WRONG


def test_one_test_leaves_nothing_to_the_next(sandbox):
    source = "import os\nprint(os.listdir('/tmp'))\nopen('/tmp/left', 'w').write('x')"
    box = sandbox(scratch_bytes=MIB)
    assert [outcome(box, StdinTest("", "[]"), source) for _ in range(2)] == [Outcome.PASSED] * 2


def test_many_programs_run_concurrently_up_to_the_limit(sandbox):
    box = sandbox(wall_seconds=120.0)
    box.concurrency = 3
    mark = f"many-{time.time_ns()}"

    def num_running() -> int:
        return len(children_of(os.getpid(), processes_with(mark)))

    async def run_all(source: str, most: int) -> list[asyncio.Task]:
        """Start nine programs. Return when all have ended or when `most` of them run at once."""
        runs = [asyncio.create_task(box.run(source, arguments=[mark, str(n)])) for n in range(9)]
        while not all(one.done() for one in runs) and (running := num_running()) < most:
            assert running <= 3
            await asyncio.sleep(0.01)
        return runs

    async def check() -> None:
        runs = await run_all("import sys, time\nprint(sys.argv[2])\ntime.sleep(0.1)", most=4)
        assert [one.result().stdout for one in runs] == [f"{n}\n".encode() for n in range(9)]
        runs = await run_all("import time\ntime.sleep(100)", most=3)
        assert not any(one.done() for one in runs)
        for one in runs:
            one.cancel()
        await asyncio.wait(runs)

    asyncio.run(check())


def children_of(parent, pids):
    found = []
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) == parent:
            found.append(pid)
    return found
