"""The seccomp filter. It allows the system calls that Python needs to compute, read and print. All
other system calls fail.

This is an allow list, so system calls that a future kernel adds fail too. A program has no sockets,
no shared memory that outlives its process, no tracing, no mounts, no keys, no namespaces, and no
second process unless `Limits.processes` is above 1. libseccomp compiles the filter, because it
knows the call numbers of each architecture.
"""

import ctypes
import ctypes.util
import errno
import os
from collections.abc import Sequence
from functools import cache

from planish.sandbox.errors import SandboxUnavailableError

FILE_CALLS = """
    access chdir chmod close close_range dup dup2 dup3 faccessat faccessat2 fadvise64 fchdir fchmod fchmodat fcntl fdatasync
    flock fstat fstatfs fsync ftruncate getcwd getdents getdents64 link linkat lseek lstat mkdir mkdirat newfstatat open openat
    pread64 preadv pwrite64 pwritev read readlink readlinkat readv rename renameat renameat2 rmdir stat statfs statx symlink
    symlinkat truncate umask unlink unlinkat utimensat write writev
"""
MEMORY_CALLS = "brk madvise mincore mmap mprotect mremap munmap"
TIME_CALLS = """
    alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep pause
    setitimer time times
"""
WAITING_CALLS = """
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_wait pipe pipe2 poll ppoll pselect6 select
"""
SIGNAL_CALLS = """
    kill restart_syscall rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sigaltstack
    tgkill tkill
"""
THREAD_CALLS = """
    futex futex_waitv get_robust_list membarrier rseq sched_getaffinity sched_getparam sched_get_priority_max
    sched_get_priority_min sched_getscheduler sched_yield set_robust_list set_tid_address
"""
PROCESS_CALLS = """
    arch_prctl execve exit exit_group getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom
    getresgid getresuid getrlimit getrusage getsid gettid getuid prlimit64 setpgid setrlimit setsid sysinfo uname wait4 waitid
"""
ALLOWED_CALLS = tuple(
    f"{FILE_CALLS} {MEMORY_CALLS} {TIME_CALLS} {WAITING_CALLS} {SIGNAL_CALLS} {THREAD_CALLS} "
    f"{PROCESS_CALLS}".split()
)
FORK_CALLS = ("fork", "vfork")
# Ordinary programs try these calls. All other forbidden calls fail with ENOSYS ("not implemented").
# For these, EPERM ("not permitted") explains the failure better.
EPERM_CALLS = ("socket", "socketpair", "ptrace", "mount", "unshare", "setuid")
ALLOWED_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)
"""The allowed ioctl requests: TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX and FIOCLEX. All others could
reach a device driver.
"""

CLONE_THREAD = 0x00010000
CLONE_NEW_NAMESPACE = 0x7E020000
ALLOW_ACTION = 0x7FFF0000
ERRNO_ACTION = 0x00050000
"""SCMP_ACT_ERRNO: the errno goes into the lower 16 bits."""
EQUAL, MASKED_EQUAL = 4, 7
"""SCMP_CMP_EQ and SCMP_CMP_MASKED_EQ of libseccomp."""


class ArgumentComparison(ctypes.Structure):
    """libseccomp's struct scmp_arg_cmp, a condition on one argument of a system call. `argument` is
    the argument's index. EQUAL compares the argument with `first`. MASKED_EQUAL compares
    (argument & first) with `second`.
    """

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


@cache
def compiled_filter(allow_processes: bool) -> bytes:
    """Return the filter as the kernel reads it: an array of struct sock_filter. `allow_processes`:
    whether the program may start processes. Raises SandboxUnavailableError if libseccomp is missing
    or fails.
    """
    seccomp_filter = SeccompFilter()
    try:
        for name in ALLOWED_CALLS:
            seccomp_filter.add(ALLOW_ACTION, name)
        for number in ALLOWED_IOCTLS:
            seccomp_filter.add(ALLOW_ACTION, "ioctl", ArgumentComparison(1, EQUAL, number, 0))
        if allow_processes:
            for name in FORK_CALLS:
                seccomp_filter.add(ALLOW_ACTION, name)
            seccomp_filter.add(
                ALLOW_ACTION, "clone", ArgumentComparison(0, MASKED_EQUAL, CLONE_NEW_NAMESPACE, 0)
            )
        else:
            clone_flags = CLONE_NEW_NAMESPACE | CLONE_THREAD
            seccomp_filter.add(
                ALLOW_ACTION,
                "clone",
                ArgumentComparison(0, MASKED_EQUAL, clone_flags, CLONE_THREAD),
            )
            seccomp_filter.add(
                ERRNO_ACTION | errno.EPERM,
                "clone",
                ArgumentComparison(0, MASKED_EQUAL, CLONE_THREAD, 0),
            )
            for name in FORK_CALLS:
                seccomp_filter.add(ERRNO_ACTION | errno.EPERM, name)
        for name in EPERM_CALLS:
            seccomp_filter.add(ERRNO_ACTION | errno.EPERM, name)
        return seccomp_filter.to_bytes()
    finally:
        seccomp_filter.release()


class SeccompFilter:
    """A seccomp filter under construction. Calls without a rule fail with ENOSYS."""

    def __init__(self) -> None:
        self._library = seccomp_library()
        self._context = self._library.seccomp_init(ERRNO_ACTION | errno.ENOSYS)
        if not self._context:
            raise SandboxUnavailableError(
                "libseccomp cannot make a filter for this kernel; update libseccomp"
            )

    def add(self, action: int, call_name: str, *comparisons: ArgumentComparison) -> None:
        """Add a rule for `call_name`, or none if this architecture does not have the call."""
        number = self._library.seccomp_syscall_resolve_name(call_name.encode())
        if number < 0:
            return
        comparison_array = (ArgumentComparison * len(comparisons))(*comparisons)
        error_code = self._library.seccomp_rule_add_array(
            self._context, action, number, len(comparisons), comparison_array
        )
        if error_code != 0:
            raise SandboxUnavailableError(
                f"libseccomp refuses the rule for {call_name} ({os.strerror(-error_code)}); update "
                f"libseccomp"
            )

    def to_bytes(self) -> bytes:
        """Return the compiled filter."""
        descriptor = os.memfd_create("filter")
        try:
            error_code = self._library.seccomp_export_bpf(self._context, descriptor)
            if error_code != 0:
                raise SandboxUnavailableError(
                    f"libseccomp cannot export its filter ({os.strerror(-error_code)}); update "
                    f"libseccomp"
                )
            return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Free libseccomp's memory of this filter."""
        self._library.seccomp_release(self._context)


@cache
def seccomp_library() -> ctypes.CDLL:
    """Load libseccomp. Raises SandboxUnavailableError if it is not installed."""
    library_names: Sequence[str] = [
        name for name in ("libseccomp.so.2", ctypes.util.find_library("seccomp")) if name
    ]
    for name in library_names:
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
            ctypes.POINTER(ArgumentComparison),
        ]
        library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
        return library
    raise SandboxUnavailableError(
        "model-written programs run only in a sandbox, which needs libseccomp; install it (Debian, "
        "Ubuntu: apt-get install libseccomp2; Fedora: dnf install libseccomp)"
    )
