"""The inside of the sandbox: gives up what a test needs not, then runs a program from stdin.

Runs as a script of its own, `python -I -B sandbox_child.py`, and imports nothing of the package.
stdin: one line of JSON (seconds, memory, word), then the program. The word goes to the standard
output once the whole program ran without an exception, so leaving early by `exit(0)` is no success.

Three walls, all the kernel's own and without a way back: resource limits (processor time, address
space, file size, open files, no core dump), no privileges but to read files, even for root, and a
seccomp filter under which a system call that opens a socket, opens a file for writing, changes a
file system, starts, signals, traces or slows another process, makes what outlives this one, or
enters io_uring fails. Files can be read, threads started.
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
_CAPABILITIES, _READING = 0x20080522, 1 << 2  # capset's version 3; CAP_DAC_READ_SEARCH
_SETOWN, _SETOWN_EX = 8, 15  # of fcntl: whom a file's signals go to
_ATTRIBUTES = (0x40086602, 0x40046602, 0x401C5820)  # of ioctl: FS_IOC(32)_SETFLAGS, FSSETXATTR
_TYPE_FOR = 0x5412  # of ioctl: TIOCSTI, letters into a terminal
_SHARED = {  # one number on all machines
    "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434, "openat2": 437,
    "pidfd_getfd": 438, "process_madvise": 440, "fchmodat2": 452, "setxattrat": 463,
    "removexattrat": 466, "file_setattr": 469,
}  # fmt: skip

# audit's number of the machine; system calls that are refused; those that open a file, with the
# number of the argument that holds the flags; clone; fcntl, ioctl, tgkill, prlimit64
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "connect": 42, "socketpair": 53, "bind": 49, "listen": 50, "sendto": 44,
            "kill": 62, "tkill": 200, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
            "ptrace": 101, "process_vm_writev": 311, "process_vm_readv": 310,
            "setpriority": 141, "ioprio_set": 251, "sched_setparam": 142,
            "sched_setscheduler": 144, "sched_setaffinity": 203, "sched_setattr": 314,
            "migrate_pages": 256, "move_pages": 279, "shmget": 29, "shmat": 30, "shmctl": 31,
            "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220, "msgget": 68,
            "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240, "mq_unlink": 241,
            "add_key": 248, "request_key": 249, "keyctl": 250,
            "rename": 82, "renameat": 264, "renameat2": 316, "mkdir": 83, "mkdirat": 258,
            "rmdir": 84, "creat": 85, "link": 86, "linkat": 265, "unlink": 87, "unlinkat": 263,
            "symlink": 88, "symlinkat": 266, "chmod": 90, "fchmod": 91, "fchmodat": 268,
            "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
            "truncate": 76, "ftruncate": 77, "mknod": 133, "mknodat": 259, "utime": 132,
            "utimes": 235, "utimensat": 280, "futimesat": 261, "setxattr": 188, "lsetxattr": 189,
            "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
            "mount": 165, "umount2": 166, "open_by_handle_at": 304, "memfd_create": 319,
            "bpf": 321, "unshare": 272, "setns": 308, "fork": 57, "vfork": 58, "execve": 59,
            "execveat": 322,
        },
        {"open": (2, 1), "openat": (257, 2)},
        56,
        (72, 16, 234, 302),
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "connect": 203, "socketpair": 199, "bind": 200, "listen": 201,
            "sendto": 206, "kill": 129, "tkill": 130, "rt_sigqueueinfo": 138,
            "rt_tgsigqueueinfo": 240, "ptrace": 117, "process_vm_writev": 271,
            "process_vm_readv": 270, "setpriority": 140, "ioprio_set": 30, "sched_setparam": 118,
            "sched_setscheduler": 119, "sched_setaffinity": 122, "sched_setattr": 274,
            "migrate_pages": 238, "move_pages": 239, "shmget": 194, "shmat": 196, "shmctl": 195,
            "semget": 190, "semop": 193, "semctl": 191, "semtimedop": 192, "msgget": 186,
            "msgsnd": 189, "msgrcv": 188, "msgctl": 187, "mq_open": 180, "mq_unlink": 181,
            "add_key": 217, "request_key": 218, "keyctl": 219,
            "renameat": 38, "renameat2": 276, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36,
            "linkat": 37, "fchmod": 52, "fchmodat": 53, "fchownat": 54,
            "fchown": 55, "truncate": 45, "ftruncate": 46, "mknodat": 33, "utimensat": 88,
            "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
            "fremovexattr": 16, "mount": 40, "umount2": 39, "open_by_handle_at": 265,
            "memfd_create": 279, "bpf": 280, "unshare": 97, "setns": 268, "execve": 221,
            "execveat": 281,
        },
        {"openat": (56, 2)},
        220,
        (25, 29, 131, 261),
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


def give_up() -> None:
    """Keep of this process's privileges at most that to read all files. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    kept = sets[1] & _READING
    if libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept)):
        raise OSError(ctypes.get_errno(), "capset")


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
    machine: int,
    refused: dict[str, int],
    opening: dict[str, tuple[int, int]],
    clone: int,
    judged: tuple[int, int, int, int],
) -> bytes:
    """The filter in BPF: of another machine's calls kills, refused ones fail, the rest passes."""

    def step(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, other, value)

    def argument(n: int) -> bytes:
        return step(_LOAD, 16 + 8 * n)  # the lower half; both machines are little-endian

    def judge(number: int, n: int, values: tuple[int, ...], met: int, else_: int) -> list[bytes]:
        """Of one call: by whether its n-th argument is one of these."""
        count = len(values)
        jumps = [step(_EQUAL, value, count - i) for i, value in enumerate(values)]
        ends = [step(_RETURN, else_), step(_RETURN, met)]
        return [step(_EQUAL, number, 0, count + 3), argument(n), *jumps, *ends]

    lines = [step(_LOAD, 4), step(_EQUAL, machine, 1), step(_RETURN, _KILL), step(_LOAD, 0)]
    if machine == 0xC000003E:
        lines += [step(_AT_LEAST, _X32, 0, 1), step(_RETURN, _KILL)]
    for number in (refused | _SHARED).values():
        lines += [step(_EQUAL, number, 0, 1), step(_RETURN, _DENY)]
    for number, flags in opening.values():
        lines += [step(_EQUAL, number, 0, 4), argument(flags), step(_ANY_BIT, _WRITING, 0, 1)]
        lines += [step(_RETURN, _DENY), step(_RETURN, _ALLOW)]
    fcntl, ioctl, tgkill, prlimit = judged
    lines += judge(fcntl, 1, (_SETOWN, _SETOWN_EX), _DENY, _ALLOW)
    lines += judge(ioctl, 1, (*_ATTRIBUTES, _TYPE_FOR), _DENY, _ALLOW)
    lines += judge(tgkill, 0, (os.getpid(),), _ALLOW, _DENY)
    lines += judge(prlimit, 0, (0, os.getpid()), _ALLOW, _DENY)
    lines += [step(_EQUAL, _CLONE3, 0, 1), step(_RETURN, _UNKNOWN)]
    lines += [step(_EQUAL, clone, 0, 3), argument(0), step(_ANY_BIT, _THREAD, 1)]
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
    give_up()
    forbid()
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    os.write(out, told["word"].encode())


if __name__ == "__main__":
    main()
