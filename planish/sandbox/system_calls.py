"""The system calls that a program in the sandbox has: what Python needs to compute, read and print.
All others do not exist.

The list is one of what is allowed, so a call that a future kernel adds is refused too. There are no
sockets, no shared memory that outlives its process, no tracing, no mounts, no keys, no namespaces;
and no second process unless `processes` asks for it. The filter itself is compiled by libseccomp,
which knows the numbers of the calls on each architecture.
"""

import ctypes
import ctypes.util
import errno
import os
from collections.abc import Sequence
from functools import cache

from planish.sandbox.errors import SandboxUnavailableError

FILES = """
    access chdir chmod close close_range dup dup2 dup3 faccessat faccessat2 fadvise64 fchdir fchmod fchmodat fcntl fdatasync
    flock fstat fstatfs fsync ftruncate getcwd getdents getdents64 link linkat lseek lstat mkdir mkdirat newfstatat open openat
    pread64 preadv pwrite64 pwritev read readlink readlinkat readv rename renameat renameat2 rmdir stat statfs statx symlink
    symlinkat truncate umask unlink unlinkat utimensat write writev
"""
MEMORY = "brk madvise mincore mmap mprotect mremap munmap"
TIME = "alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep pause setitimer time times"
WAITING = """
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_wait pipe pipe2 poll ppoll pselect6 select
"""
SIGNALS = """
    kill restart_syscall rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sigaltstack
    tgkill tkill
"""
THREADS = """
    futex futex_waitv get_robust_list membarrier rseq sched_getaffinity sched_getparam sched_get_priority_max
    sched_get_priority_min sched_getscheduler sched_yield set_robust_list set_tid_address
"""
PROCESS = """
    arch_prctl execve exit exit_group getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom
    getresgid getresuid getrlimit getrusage getsid gettid getuid prlimit64 setpgid setrlimit setsid sysinfo uname wait4 waitid
"""
ALLOWED = tuple(" ".join((FILES, MEMORY, TIME, WAITING, SIGNALS, THREADS, PROCESS)).split())
FORKS = ("fork", "vfork")
# Programs meet these: "not permitted" says more to them than "not implemented", which is what all
# others get.
NOT_PERMITTED = ("socket", "socketpair", "ptrace", "mount", "unshare", "setuid")
TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)
"""ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX. Every other one speaks to a driver."""

CLONE_THREAD = 0x00010000
CLONE_NEW_NAMESPACE = 0x7E020000
ALLOW = 0x7FFF0000
REFUSE = 0x00050000
"""With the error number in its lower half."""
EQUAL, MASKED_EQUAL = 4, 7
"""Comparisons of libseccomp."""


class Comparison(ctypes.Structure):
    """struct scmp_arg_cmp: `argument operation first (second)`; for MASKED_EQUAL, `argument & first
    == second`.
    """

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


@cache
def compiled_filter(allow_processes: bool) -> bytes:
    """The filter as the kernel takes it (struct sock_filter, one after the other)."""
    rules = SystemCallRules()
    try:
        for name in ALLOWED:
            rules.add(ALLOW, name)
        for number in TERMINAL_QUESTIONS:
            rules.add(ALLOW, "ioctl", Comparison(1, EQUAL, number, 0))
        if allow_processes:
            for name in FORKS:
                rules.add(ALLOW, name)
            rules.add(ALLOW, "clone", Comparison(0, MASKED_EQUAL, CLONE_NEW_NAMESPACE, 0))
        else:
            watched = CLONE_NEW_NAMESPACE | CLONE_THREAD
            rules.add(ALLOW, "clone", Comparison(0, MASKED_EQUAL, watched, CLONE_THREAD))
            rules.add(REFUSE | errno.EPERM, "clone", Comparison(0, MASKED_EQUAL, CLONE_THREAD, 0))
            for name in FORKS:
                rules.add(REFUSE | errno.EPERM, name)
        for name in NOT_PERMITTED:
            rules.add(REFUSE | errno.EPERM, name)
        return rules.exported()
    finally:
        rules.release()


class SystemCallRules:
    """A filter of libseccomp that is being made: what no rule names fails as a call that does not
    exist.
    """

    def __init__(self) -> None:
        self._library = seccomp_library()
        self._context = self._library.seccomp_init(REFUSE | errno.ENOSYS)
        if not self._context:
            raise SandboxUnavailableError(
                "libseccomp cannot make a filter for this kernel; update libseccomp"
            )

    def add(self, action: int, call: str, *comparisons: Comparison) -> None:
        """A call that this architecture does not have is left out."""
        number = self._library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            return
        array = (Comparison * len(comparisons))(*comparisons)
        code = self._library.seccomp_rule_add_array(
            self._context, action, number, len(comparisons), array
        )
        if code != 0:
            raise SandboxUnavailableError(
                f"libseccomp refuses the rule for {call} ({os.strerror(-code)}); update libseccomp"
            )

    def exported(self) -> bytes:
        descriptor = os.memfd_create("filter")
        try:
            code = self._library.seccomp_export_bpf(self._context, descriptor)
            if code != 0:
                raise SandboxUnavailableError(
                    f"libseccomp cannot export its filter ({os.strerror(-code)}); update libseccomp"
                )
            return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        self._library.seccomp_release(self._context)


@cache
def seccomp_library() -> ctypes.CDLL:
    found: Sequence[str] = [
        name for name in ("libseccomp.so.2", ctypes.util.find_library("seccomp")) if name
    ]
    for name in found:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.seccomp_init.argtypes = [ctypes.c_uint32]
        library.seccomp_init.restype = ctypes.c_void_p
        library.seccomp_release.argtypes = [ctypes.c_void_p]
        library.seccomp_release.restype = None
        library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
        library.seccomp_rule_add_array.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.POINTER(Comparison),
        ]
        library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
        return library
    raise SandboxUnavailableError(
        "programs of a model run in a sandbox, and that needs libseccomp; install it (Debian, Ubuntu: apt-get install "
        "libseccomp2; Fedora: dnf install libseccomp)"
    )
