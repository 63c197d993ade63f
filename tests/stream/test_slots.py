"""The memory of slots: whole pages, private, there already, and not given to forked children."""

from __future__ import annotations

import os
from pathlib import Path

from optstream.memory import read_memory
from optstream.stream.slots import allocate

NUM_BYTES = 8 * 2**20


def vm_flags(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_a_slot_is_private_memory_that_is_there() -> None:
    before = read_memory()
    slot = allocate(NUM_BYTES)
    after = read_memory()
    assert after.anon_bytes - before.anon_bytes >= NUM_BYTES - 2**20
    assert after.shmem_bytes == before.shmem_bytes
    assert slot.tensor.data_ptr() % 4096 == 0
    assert len(slot.memory) == slot.tensor.nbytes == NUM_BYTES


def test_a_forked_child_has_no_slots() -> None:
    """So that no copy of a page is made while a transfer into it is under way."""
    slot = allocate(NUM_BYTES)
    assert "dc" in vm_flags(slot.tensor.data_ptr())
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    slot.tensor.fill_(1)
