"""Begins a program that ends by no signal but SIGKILL: ``python -I -S deaf.py PROGRAM ARGUMENTS``.

Batch systems and systemd send SIGTERM to every process of a job. Our daemon would be gone before the run could end in
order. The daemon installs handlers for all signals, so ignoring signals is not enough: a filter of the kernel (seccomp)
drops requests to change the handling of ``DEAF_TO``. Without seccomp (macOS, further chips) the program begins without
a filter. Imports nothing of the package, to start in a fraction of the time.
"""

import ctypes
import os
import platform
import signal
import struct
import sys

DEAF_TO = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
_SIGACTION = {"x86_64": (0xC000003E, 13), "aarch64": (0xC00000B7, 134)}
"""By chip: AUDIT_ARCH of <linux/audit.h>, and the number of the call rt_sigaction."""
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06
"""BPF: load a word of ``struct seccomp_data``, jump if equal, return."""
_CALL, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in ``struct seccomp_data``."""
_ALLOW, _PRETEND = 0x7FFF0000, 0x00050000
"""Verdicts: let the call pass, and answer 0 instead."""
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
"""Of <linux/prctl.h>."""


def rules(arch: int, call: int) -> bytes:
    """The filter as ``struct sock_filter`` (code, jump if true, jump if false, value): rt_sigaction of a signal in
    ``DEAF_TO`` does nothing, every other call passes."""
    last = 5 + len(DEAF_TO)
    steps = [
        (_LOAD, 0, 0, _ARCH),
        (_IS, 0, last - 2, arch),
        (_LOAD, 0, 0, _CALL),
        (_IS, 0, last - 4, call),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *((_IS, last - 5 - k, 0, number) for k, number in enumerate(DEAF_TO)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _PRETEND),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def stop_listening() -> None:
    """Ignore ``DEAF_TO`` in this process, also after ``exec``."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DEAF_TO)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
    if sys.platform != "linux" or platform.machine() not in _SIGACTION:
        return
    code = rules(*_SIGACTION[platform.machine()])
    program = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(_SECCOMP, _FILTER, ctypes.addressof(header), 0, 0)


if __name__ == "__main__":
    stop_listening()
    os.execv(sys.argv[1], sys.argv[1:])
