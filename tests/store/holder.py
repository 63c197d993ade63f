"""A process with two windows in a directory: `python -c HOLDER DIR nameless|named PACKAGE STORE`.

At each line on standard input it checks that they are unharmed, or ends as it is asked to.
"""

from __future__ import annotations

import subprocess

HOLDER = """
import errno, mmap, os, sys, types
package = types.ModuleType("optstream")  # not the real one: it imports torch, which takes seconds
package.__path__ = [sys.argv[3]]
sys.modules["optstream"] = package
if sys.argv[2] == "named":
    real = os.open
    def open_(path, flags, *args):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "")
        return real(path, flags, *args)
    os.open = open_
from optstream.format import build_header
from optstream.store import WindowFile, open_store
store = open_store(sys.argv[4], sys.argv[1])
store.reserve([WindowFile(build_header([], 2**20), 2**20)] * 2)
buffer, found = (memoryview(mmap.mmap(-1, 2**20)) for _ in range(2))
buffer[:] = os.getpid().to_bytes(4, "little") * 2**18
for window in range(2):
    store.write(window, 0, buffer)
print("ready", flush=True)
for line in sys.stdin:
    if line == "check\\n":
        for window in range(2):
            store.read(window, 0, found)
            store.write(window, 0, buffer)
            assert buffer == found
        print("unharmed", flush=True)
    elif line == "raise\\n":
        raise ValueError
    elif line == "exit\\n":
        sys.exit()
    elif line == "fork\\n":
        pid = os.fork()
        if pid == 0:
            sys.exit()
        assert os.waitpid(pid, 0)[1] == 0
        print("forked", flush=True)
"""


def tell(process: subprocess.Popen[str], line: str) -> str:
    """Send a line to a holder and return its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()
