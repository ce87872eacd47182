"""The file that all ranks are sent: its parts come back, aligned, and each mapping is its own."""

from __future__ import annotations

import os

import torch

from playbook_utils.workers.wire import anonymous_file, map_parts, write_parts


def test_parts_come_back_aligned_and_can_be_written_without_the_others_seeing_it() -> None:
    fd = anonymous_file()
    sent = [b"a", b"", bytes(range(256)) * 300, b"xyz"]
    write_parts(fd, sent)
    first, second = map_parts(fd), map_parts(fd)
    assert [bytes(part) for part in first] == sent
    assert all(torch.frombuffer(p, dtype=torch.uint8).data_ptr() % 64 == 0 for p in first if p)
    first[2][0] = 9
    assert [bytes(part) for part in second] == sent
    assert [bytes(part) for part in map_parts(fd)] == sent
    os.close(fd)
