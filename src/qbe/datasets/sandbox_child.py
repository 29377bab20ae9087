"""The inside of `qbe.datasets.sandbox`: gives up what it can, runs a file, says on its own channel how that ended.

Arguments: the file, seconds of processor time, bytes of memory. Imports nothing but the standard library.
"""

import ctypes
import os
import resource
import sys
from contextlib import suppress

_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
_REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.", "ctypes.",
    "os.kill", "os.putenv", "signal.pthread_kill", "shutil.", "webbrowser.", "urllib.",
)  # fmt: skip
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.ch")


def limit(seconds: int, memory: int) -> None:
    for resource_kind, most in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0),
    ):  # fmt: skip
        with suppress(OSError, ValueError):  # the limit that it has is lower
            resource.setrlimit(resource_kind, (most, most))


def leave_the_network() -> None:
    with suppress(OSError, AttributeError):  # not Linux: the hook is what there is
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)


def fence(folder: str) -> None:
    """From here on the process refuses what no answer to a programming exercise needs."""
    inside = os.path.realpath(folder) + os.sep

    def written(path: object) -> bool:
        return isinstance(path, (str, bytes)) and not os.path.realpath(os.fsdecode(path)).startswith(inside)

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(event)
        if event.startswith(_CHANGES) and any(written(a) for a in arguments):
            raise PermissionError(event)
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            if writes and written(path):
                raise PermissionError(event)

    sys.addaudithook(hook)


def main() -> None:
    path, seconds, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    channel = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    leave_the_network()
    limit(seconds, memory)
    with open(path, encoding="utf-8") as file:
        source = file.read()
    sys.argv = [path]
    fence(os.path.dirname(path))
    try:
        exec(compile(source, path, "exec"), {"__name__": "__main__"})
        said = "passed"
    except BaseException as error:  # SystemExit, too: the tests that follow it have not run
        said = type(error).__name__
    os.write(channel, said.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
