"""A memory cgroup for one process, with a limit that can be set while it runs."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

from optstream.cgroup import Group, read_group
from optstream.mounts import read_mounts

_numbers = itertools.count()


class NoGroupError(Exception):
    """Memory cgroups cannot be made here; the message says why."""


class MemoryGroup:
    """Made below this process's own group (version 1), or beside it (version 2)."""

    def __init__(self) -> None:
        name = f"optstream-{os.getpid()}-{next(_numbers)}"
        version, parent = find_parent("memory", "memory")
        self.directory = parent / name
        self._limit_file = "memory.limit_in_bytes" if version == 1 else "memory.max"
        try:
            self.directory.mkdir()
            if not (self.directory / self._limit_file).exists():
                raise NoGroupError(f"{parent} does not give its groups the memory controller")
        except OSError as error:
            raise NoGroupError(f"cannot make a cgroup in {parent}: {error.strerror}") from error
        except NoGroupError:
            self.remove()
            raise

    @property
    def procs(self) -> Path:
        """The file that a process joins by."""
        return self.directory / "cgroup.procs"

    def limit(self, num_bytes: int) -> None:
        (self.directory / self._limit_file).write_text(str(num_bytes))

    def read(self) -> Group:
        return read_group(self.directory)

    def remove(self) -> None:
        """Remove it; its process must be gone."""
        with suppress(OSError):
            self.directory.rmdir()


def find_parent(controller_v1: str, controller_v2: str) -> tuple[int, Path]:
    """Return the version, and the directory that a group can be made in.

    Raises:
        NoGroupError: the controller is mounted in neither version.
    """
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for mount in read_mounts().values():
        for number, controllers, path in lines:
            own = Path(mount.point) / os.path.relpath(path, mount.root)
            if mount.kind == "cgroup" and controller_v1 in mount.options:
                if controller_v1 in controllers.split(","):
                    return 1, own
            elif mount.kind == "cgroup2" and number == "0" and _has(own, controller_v2):
                # a group with processes of its own can have no groups with controllers below it
                return 2, own if own == Path(mount.point) else own.parent
    raise NoGroupError(f"no {controller_v2} cgroups are mounted here")


def _has(own: Path, controller: str) -> bool:
    try:
        return controller in (own / "cgroup.controllers").read_text().split()
    except OSError:
        return False
