"""Bytes from rank to rank."""

from __future__ import annotations

import pytest

from playbook_utils import show
from playbook_utils.events import CollectiveEvent
from playbook_utils.show.messages import traffic_matrix
from tests.show.drawn import flaws


def event(rank: int, op: str, group: tuple[int, ...], wire_bytes: int) -> CollectiveEvent:
    return CollectiveEvent(rank, 0, op, group, "float32", (1,), 4, wire_bytes)


def test_a_ring_sends_to_the_next_of_its_group() -> None:
    group = (0, 2, 3)
    matrix = traffic_matrix([event(rank, "all_reduce", group, 100) for rank in group] * 2)
    assert matrix == [[0, 0, 200, 0], [0, 0, 0, 0], [0, 0, 0, 200], [200, 0, 0, 0]]


def test_all_to_all_goes_to_all_others_and_loses_no_byte() -> None:
    matrix = traffic_matrix([event(1, "all_to_all_single", (0, 1, 2), 101)])
    assert matrix == [[0, 0, 0], [51, 0, 50], [0, 0, 0]]


def test_send_goes_to_its_peer_and_recv_sends_nothing() -> None:
    calls = [event(0, "send", (0, 2), 7), event(2, "recv", (2, 0), 0)]
    assert traffic_matrix(calls) == [[0, 0, 7], [0, 0, 0], [0, 0, 0]]


def test_the_matrix_is_drawn_with_senders_as_rows() -> None:
    picture = show.traffic([event(0, "send", (0, 1), 2048), event(2, "send", (2, 0), 10)])
    (axes,) = picture.figure.axes
    assert {t.get_text(): t.get_position() for t in axes.texts} == {
        "2 KiB": (1.5, 0.5),
        "10 B": (0.5, 2.5),
    }
    assert axes.collections[0].get_array().tolist() == [[0, 2048, 0], [0, 0, 0], [10, 0, 0]]
    assert axes.yaxis_inverted()


@pytest.mark.parametrize("size", [1, 12, 40])
def test_any_number_of_ranks_stays_readable(size: int) -> None:
    matrix = [[0 if i == j else 1000 * (i + 1) ** 4 for j in range(size)] for i in range(size)]
    picture = show.traffic(matrix, title="All to all")
    assert flaws(picture) == []


@pytest.mark.parametrize("given", [[], [[1, 2]], [[1], [2, 3]]])
def test_what_is_no_matrix_is_refused(given) -> None:
    with pytest.raises(ValueError, match="one row of N bytes per rank"):
        show.traffic(given)
