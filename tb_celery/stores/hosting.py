"""What the operating system offers a state file, and where it must not lie."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path

from filelock import lock_descriptor, unlock_descriptor

from tb_celery.errors import StoreError

PLACE = "name another path in the setting state_file (TB_CELERY_STATE_FILE)"
NETWORK = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "coda", "fuse.glusterfs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs"}
    | {"lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs"}
)
"""File systems whose locks do not exclude, hang, or depend on how each host mounted them."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_OPEN = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def network_file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The kind of network file system that ``path`` lies on; ``None`` for a local one or where nobody can tell."""
    kind, longest = None, -1
    target = os.path.realpath(path)
    with suppress(OSError):
        for line in mounts.read_text("utf-8", "surrogateescape").splitlines():
            fields = line.split(" ")
            if "-" not in fields[6:]:
                continue  # the last one, or one of some kernel to come
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
            inside = target == point or target.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:
                kind, longest = fields[fields.index("-") + 1], len(point)
    return kind if kind in NETWORK else None


def open_state(path: Path) -> int:
    """A descriptor of the state file at ``path``.

    Raises:
        OSError: there is none, or it cannot be opened.
        StoreError: locks cannot be relied on there, or it is no regular file.
    """
    if kind := network_file_system(path.parent):
        message = f"state file {path} is on a network file system ({kind}), whose locks cannot be relied on; {PLACE}"
        raise StoreError(message)
    fd = os.open(path, _OPEN)
    try:
        _refuse_unusable(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_unusable(path: Path, fd: int) -> None:
    """Refuse what is no file, and a file system whose locks are granted to everyone."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        message = f"{path} is not a regular file; {PLACE}"
        raise StoreError(message)
    if not lock_descriptor(fd, blocking=False):
        return
    other = os.open(path, _OPEN)
    try:
        if os.path.samestat(os.fstat(fd), os.fstat(other)) and lock_descriptor(other, blocking=False):
            message = f"file locks do not exclude on the file system of {path}; {PLACE}"
            raise StoreError(message)
    finally:
        os.close(other)
        unlock_descriptor(fd)


def failure(path: Path, error: OSError) -> StoreError:
    """What the system's ``error`` at the state file means for whoever has chosen its place."""
    if error.errno == errno.ELOOP:
        return StoreError(f"state file {path} is a symbolic link, which is refused; {PLACE}")
    if error.errno in _NO_LOCKS:
        return StoreError(f"the file system of {path} has no working file locks ({error.strerror}); {PLACE}")
    return StoreError(f"state file {path}: {error.strerror or error}; mend it, or {PLACE}")


if sys.platform != "win32":
    read_at = os.pread
    write_at = os.pwrite
else:

    def read_at(fd: int, length: int, offset: int, /) -> bytes:
        """Read as ``os.pread`` does; the caller keeps other threads away from the descriptor."""
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, length)

    def write_at(fd: int, data: bytes, offset: int, /) -> int:
        """Write as ``os.pwrite`` does; the caller keeps other threads away from the descriptor."""
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)
