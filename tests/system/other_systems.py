"""What the project's code finds on another system: names that are missing, and answers that are others."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

__all__ = ["QUALITY", "SYSTEMS", "System"]


class System(NamedTuple):
    """Another system, as differences from Linux."""

    #: packages that see it
    own: tuple[str, ...]
    #: modules that cannot be imported
    absent: frozenset[str]
    #: by module, a pattern of the names that it has not
    missing: Mapping[str, str]
    #: by module, values that are others
    values: Mapping[str, Mapping[str, Any]]


_NO_LINUX = {
    "os": r"sched_(get|set)(affinity|param|scheduler)|sched_(param|rr_get_interval)|SCHED_(BATCH|IDLE)"
    r"|posix_fa.*|POSIX_FADV_.*|memfd_create|MFD_.*|O_(PATH|TMPFILE|DIRECT|LARGEFILE|NOATIME|RSYNC)"
    r"|pidfd_.*|PIDFD_.*|P_PIDFD|(eventfd|EFD|timerfd|TFD).*|splice|SPLICE_.*|copy_file_range"
    r"|getrandom|GRND_.*|setns|unshare|CLONE_.*|fdatasync|[gs]etres[ug]id|.*xattr|XATTR_.*|pipe2"
    r"|RTLD_DEEPBIND",
    "socket": r"TCP_(USER_TIMEOUT|KEEPIDLE|QUICKACK|CORK|DEFER_ACCEPT|LINGER2|SYNCNT|WINDOW_CLAMP|INFO)"
    r"|SO_(PASSCRED|PEERCRED|DOMAIN|PROTOCOL|BINDTODEVICE|MARK|PRIORITY|INCOMING_CPU|PASSSEC|PEERSEC)"
    r"|SOCK_(CLOEXEC|NONBLOCK)|MSG_(CMSG_CLOEXEC|CONFIRM|ERRQUEUE|FASTOPEN|MORE|NOSIGNAL)"
    r"|(AF|PF)_(ALG|BLUETOOTH|CAN|NETLINK|PACKET|QIPCRTR|RDS|TIPC|VSOCK)"
    r"|(ALG|CAN|NETLINK|PACKET|TIPC|VMADDR)_.*",
    "select": r"epoll|EPOLL.*|POLLRDHUP",
    "signal": r"SIG(PWR|STKFLT|POLL|CLD|RTMIN|RTMAX)|sigtimedwait|sigwaitinfo|pidfd_send_signal",
    "mmap": r"MADV_(?!NORMAL|RANDOM|SEQUENTIAL|WILLNEED|DONTNEED|FREE).*"
    r"|MAP_(POPULATE|STACK|DENYWRITE|EXECUTABLE)",
    "time": r"CLOCK_(BOOTTIME|TAI)|pthread_getcpuclockid",
    "resource": r"prlimit|RLIMIT_(MSGQUEUE|NICE|RTPRIO|RTTIME|SIGPENDING|OFILE)|RUSAGE_THREAD",
    "fcntl": r"F_(ADD_SEALS|GET_SEALS|SEAL_.*|OFD_.*|[GS]ETPIPE_SZ|NOTIFY|[GS]ETLEASE|[GS]ETSIG)|DN_.*",
}


# -- macOS -------------------------------------------------------------------------------------------------

#: answers of an Apple M2 with 16 GiB
_SYSCTL = {
    "hw.memsize": struct.pack("=Q", 16 << 30),
    "hw.optional.AdvSIMD": struct.pack("=i", 1),
    "hw.optional.arm.FEAT_BF16": struct.pack("=i", 1),
    "hw.optional.arm.FEAT_DotProd": struct.pack("=i", 1),
    "hw.optional.arm.FEAT_FP16": struct.pack("=i", 1),
    "hw.optional.arm.FEAT_I8MM": struct.pack("=i", 1),
    "hw.optional.arm.FEAT_LSE": struct.pack("=i", 1),
    "hw.optional.arm.FEAT_SME": struct.pack("=i", 0),
    "vm.pagesize": struct.pack("=i", 16384),
    "vm.page_free_count": struct.pack("=i", 300_000),
    "vm.page_pageable_external_count": struct.pack("=i", 200_000),
    "vm.page_purgeable_count": struct.pack("=i", 1_000),
}
#: the class that a thread has asked for, by its id
QUALITY: dict[int, int] = {}
_EOF, _ERROR = 0x8000, 0x4000
_UNAME = ("Darwin", "mac", "24.5.0", "Darwin Kernel Version 24.5.0", "arm64")


def _sysctlbyname(name: bytes, found: Any, size: Any, new: object, new_size: object) -> int:
    value = _SYSCTL.get(name.decode())
    if value is None:
        return -1
    found[: len(value)] = value
    size._obj.value = len(value)
    return 0


def _proc_pidinfo(pid: int, flavour: int, argument: object, found: Any, size: int) -> int:
    if pid != os.getpid() or flavour != 4 or size < 96:
        return 0
    found[:16] = struct.pack("=QQ", 400 << 30, 300 << 20)
    return 96


def _set_quality(quality: int, relative: int) -> int:
    QUALITY[threading.get_native_id()] = quality
    return 0


def _relieve(zone: None, goal: ctypes.c_size_t) -> int:
    """Not doing so, glibc would hand out memory again that counts as taken, as it is not on a Mac."""
    assert (zone, goal.value) == (None, 0)
    return int(ctypes.CDLL(None).malloc_trim(0))


class _MacLibrary:
    """The C library of macOS, over that of Linux."""

    _own: Mapping[str, Any] = {
        "sysctlbyname": _sysctlbyname,
        "proc_pidinfo": _proc_pidinfo,
        "pthread_set_qos_class_self_np": _set_quality,
        "malloc_zone_pressure_relief": _relieve,
    }

    def __init__(self, real: ctypes.CDLL) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name in ("malloc_trim", "prctl", "syscall"):
            raise AttributeError(name)
        return self._own[name] if name in self._own else getattr(self._real, name)


def _mac_library(name: str | None, *arguments: Any, **named: Any) -> Any:
    found = ctypes.CDLL(name, *arguments, **named)
    return found if name is not None else _MacLibrary(found)


class _Kqueue:
    """Of kqueue(2) what tells the end of a stream."""

    def control(self, changes: Sequence[Any], most: int, timeout: float | None = None) -> list[Any]:
        assert timeout == 0
        found = []
        for each in changes:
            if each.ident < 0:
                return [SimpleNamespace(ident=each.ident, flags=_ERROR)]
            poll = select.poll()
            poll.register(each.ident, select.POLLRDHUP | select.POLLIN)
            for _, events in poll.poll(0):
                ended = bool(events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR))
                found.append(SimpleNamespace(ident=each.ident, flags=_EOF * ended))
        return found[:most]

    def close(self) -> None:
        pass


def _kevent(ident: int, filter: int, flags: int) -> Any:
    return SimpleNamespace(ident=ident)


def _mac_priority(which: int, who: int, priority: int) -> None:
    if who not in (0, os.getpid()):
        raise ProcessLookupError(3, os.strerror(3))  # numbers of threads are none of processes there
    os.setpriority(which, who, priority)


def _mac_sysconf(name: str | int) -> int:
    if name == "SC_AVPHYS_PAGES":
        raise ValueError("unrecognized configuration name")
    return os.sysconf(name)


_MAC = System(
    own=("aioinfer", "bench", "examples", "tests"),
    absent=frozenset({"posix", "triton"}),
    missing=_NO_LINUX,
    values={
        "sys": {"platform": "darwin"},
        "platform": {
            "system": lambda: "Darwin",
            "machine": lambda: "arm64",
            "processor": lambda: "arm",
            "release": lambda: _UNAME[2],
            "platform": lambda *_: "macOS-15.5-arm64-arm-64bit",
        },
        "os": {
            "uname": lambda: os.uname_result(_UNAME),
            "setpriority": _mac_priority,
            "sysconf": _mac_sysconf,
        },
        "select": {
            "kqueue": _Kqueue,
            "kevent": _kevent,
            "KQ_FILTER_READ": -1,
            "KQ_EV_ADD": 1,
            "KQ_EV_EOF": _EOF,
            "KQ_EV_ERROR": _ERROR,
        },
        "ctypes": {"CDLL": _mac_library},
    },
)


# -- Windows -----------------------------------------------------------------------------------------------


def _windows_library(name: str | None, *arguments: Any, **named: Any) -> Any:
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    return ctypes.CDLL(name, *arguments, **named)


_WINDOWS = System(
    own=("aioinfer",),
    absent=frozenset(
        {"curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios"}
        | {"triton", "tty", "uvloop"}
    ),
    missing=_NO_LINUX
    | {
        "os": _NO_LINUX["os"] + r"|sched_.*|SCHED_.*|f(ork|orkpty|chmod|chown|chdir|pathconf|statvfs)"
        r"|register_at_fork|[gs]ete?[ug]id|[gs]et(pgid|pgrp|sid|groups|priority)|PRIO_.*|nice|uname|killpg"
        r"|wait(id|3|4)?|W(NOHANG|UNTRACED|CONTINUED|EXIT.*|IF.*|STOPSIG|TERMSIG)|sysconf.*|confstr.*"
        r"|p(read|write)v?|l?chown|mk(fifo|nod)|statvfs|sendfile|openpty|ctermid|getloadavg|initgroups"
        r"|lockf|posix_.*|sync|O_(CLOEXEC|NOFOLLOW|DIRECTORY|NONBLOCK|SYNC|DSYNC|NOCTTY|ASYNC|NDELAY)"
        r"|RTLD_.*|EX_.*|F_.*|chroot|readv|writev|tc[gs]etpgrp",
        "socket": _NO_LINUX["socket"] + r"|AF_UNIX|SO_REUSEPORT|MSG_DONTWAIT",
        "select": r"(?!select|error).*",
        "signal": r"SIG(?!INT|TERM|ABRT|FPE|ILL|SEGV|_DFL|_IGN).*|pause|alarm|.*itimer|ITIMER_.*|pthread_.*"
        r"|sig(wait|pend|int).*|sigtimedwait|pidfd_send_signal",
        "mmap": r"MADV_.*|MAP_.*|PROT_.*",
        "time": r"clock_(get|set).*|CLOCK_.*|tzset|pthread_getcpuclockid",
    },
    values={
        "sys": {"platform": "win32"},
        "platform": {
            "system": lambda: "Windows",
            "machine": lambda: "AMD64",
            "processor": lambda: "Intel64 Family 6",
            "release": lambda: "11",
            "platform": lambda *_: "Windows-11-10.0.26100-SP0",
        },
        "os": {"name": "nt"},
        "ctypes": {"CDLL": _windows_library},
    },
)

#: by ``sys.platform``
SYSTEMS = {"darwin": _MAC, "win32": _WINDOWS}
