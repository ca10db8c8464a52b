"""What the operating system offers a state file, and where it must not lie."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

NETWORK = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "coda", "fuse.glusterfs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs"}
    | {"lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs"}
)
"""File systems whose locks do not exclude, hang, or depend on how each host mounted them."""


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


if hasattr(os, "pread"):
    read_at = os.pread
    write_at = os.pwrite
else:

    def read_at(fd: int, length: int, offset: int, /) -> bytes:
        """Read as ``os.pread`` does; the caller keeps other threads away from the descriptor."""
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, length)

    def write_at(fd: int, data: bytes, offset: int, /) -> int:  # type: ignore[misc]
        """Write as ``os.pwrite`` does; the caller keeps other threads away from the descriptor."""
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)
