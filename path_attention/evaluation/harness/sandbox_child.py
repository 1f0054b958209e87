"""The inside of the sandbox: gives up what a test needs not, then runs a program from stdin.

Runs as a script of its own, `python -I -B sandbox_child.py`, and imports nothing of the package.
stdin: one line of JSON (seconds, memory, word), then the program. The word goes to the standard
output once the whole program ran without an exception, so leaving early by `exit(0)` is no success.

Two walls, both the kernel's own and without a way back: resource limits (processor time, address
space, file size, open files, no core dump), and a seccomp filter under which a system
call that opens a socket, opens a file for writing, changes a file system, starts, signals or traces
another process, or enters io_uring fails. Files can be read, threads started.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _DENY, _UNKNOWN, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM, ENOSYS
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # BPF opcodes
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_THREAD = 0x10000  # the flag of clone that shares the process
_CLONE3 = 435  # its flags lie in memory, so that C libraries are sent back to clone
_X32 = 0x40000000  # system calls of another calling convention start here

# audit's number of the machine; system calls that are refused; those that open a file, with the
# number of the argument that holds the flags; clone
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "connect": 42, "socketpair": 53, "bind": 49, "listen": 50, "sendto": 44,
            "kill": 62, "tkill": 200, "pidfd_send_signal": 424, "ptrace": 101,
            "process_vm_writev": 311, "process_vm_readv": 310, "io_uring_setup": 425,
            "rename": 82, "renameat": 264, "renameat2": 316, "mkdir": 83, "mkdirat": 258,
            "rmdir": 84, "creat": 85, "link": 86, "linkat": 265, "unlink": 87, "unlinkat": 263,
            "symlink": 88, "symlinkat": 266, "chmod": 90, "fchmod": 91, "fchmodat": 268,
            "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
            "truncate": 76, "ftruncate": 77, "mknod": 133, "mknodat": 259, "utime": 132,
            "utimes": 235, "utimensat": 280, "setxattr": 188, "mount": 165, "umount2": 166,
            "openat2": 437, "memfd_create": 319, "bpf": 321, "unshare": 272, "setns": 308,
            "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
        },
        {"open": (2, 1), "openat": (257, 2)},
        56,
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "connect": 203, "socketpair": 199, "bind": 200, "listen": 201,
            "sendto": 206, "kill": 129, "tkill": 130, "pidfd_send_signal": 424, "ptrace": 117,
            "process_vm_writev": 271, "process_vm_readv": 270, "io_uring_setup": 425,
            "renameat": 38, "renameat2": 276, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36,
            "linkat": 37, "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchownat": 54,
            "fchown": 55, "truncate": 45, "ftruncate": 46, "mknodat": 33, "utimensat": 88,
            "setxattr": 5, "mount": 40, "umount2": 39, "openat2": 437, "memfd_create": 279,
            "bpf": 280, "unshare": 97, "setns": 268, "execve": 221, "execveat": 281,
        },
        {"openat": (56, 2)},
        220,
    ),
}  # fmt: skip


def limit(seconds: int, memory: int) -> None:
    """Bound this process's time and memory, and forbid it files and dumps."""
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(what, (most, most))


def forbid() -> None:
    """Install the filter of system calls; it holds for every thread and child from now on.

    Raises OSError where the kernel has none, on other machines than x86-64 and arm64 too.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(f"no filter for {platform.machine()}")
    program = _program(*_MACHINES[platform.machine()])

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    code = ctypes.create_string_buffer(program, len(program))
    header = Program(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER, ctypes.byref(header), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp refused the filter")


def _program(
    machine: int, refused: dict[str, int], opening: dict[str, tuple[int, int]], clone: int
) -> bytes:
    """The filter in BPF: of another machine's calls kills, refused ones fail, the rest passes."""

    def step(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, other, value)

    lines = [step(_LOAD, 4), step(_EQUAL, machine, 1), step(_RETURN, _KILL), step(_LOAD, 0)]
    if machine == 0xC000003E:
        lines += [step(_AT_LEAST, _X32, 0, 1), step(_RETURN, _KILL)]
    for number in refused.values():
        lines += [step(_EQUAL, number, 0, 1), step(_RETURN, _DENY)]
    for number, argument in opening.values():
        flags = step(_LOAD, 16 + 8 * argument)  # the lower half; both machines are little-endian
        lines += [step(_EQUAL, number, 0, 4), flags, step(_ANY_BIT, _WRITING, 0, 1)]
        lines += [step(_RETURN, _DENY), step(_RETURN, _ALLOW)]
    lines += [step(_EQUAL, _CLONE3, 0, 1), step(_RETURN, _UNKNOWN)]
    lines += [step(_EQUAL, clone, 0, 3), step(_LOAD, 16), step(_ANY_BIT, _THREAD, 1)]
    lines += [step(_RETURN, _DENY)]
    return b"".join([*lines, step(_RETURN, _ALLOW)])


def main() -> None:
    """Read limits and program, give up the rest, run it, say the word."""
    told = json.loads(sys.stdin.buffer.readline())
    program = sys.stdin.buffer.read().decode("utf-8")
    out = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    limit(told["seconds"], told["memory"])
    forbid()
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    os.write(out, told["word"].encode())


if __name__ == "__main__":
    main()
