"""Tables, comparisons and numbers as text."""

from __future__ import annotations

import numpy as np
import pytest

from playbook_utils import show
from playbook_utils.show.units import bytes_text, number_text, ratio_text


def test_a_table_aligns_numbers_right_and_text_left() -> None:
    rows = [{"rung": "naive", "calls": 1055, "ratio": 1.0}, {"rung": "buckets", "calls": 4}]
    assert str(show.table(rows, title="Rungs")) == (
        "Rungs\n"
        "rung      calls   ratio\n"
        "-----------------------\n"
        "naive     1,055   1.000\n"
        "buckets       4       -"
    )


def test_a_table_shows_and_prints_the_same(capsys) -> None:
    table = show.table([("a", True)], columns=["name", "equal"])
    print(table)
    assert capsys.readouterr().out.rstrip("\n") == repr(table) == table.text
    assert "yes" in table.text


def test_columns_can_be_chosen_and_ordered() -> None:
    table = show.table([{"a": 1, "b": 2, "c": 3}], columns=["c", "a"])
    assert table.text.split("\n")[0] == "c   a" and table.text.split("\n")[2] == "3   1"


@pytest.mark.parametrize("words", [1, 5, 30, 200])
def test_no_line_is_wider_than_a_cell_and_no_word_is_lost(words: int) -> None:
    long = " ".join(f"word{i}" for i in range(words))
    table = show.table([("name", 10**15, long, long)], columns=["a", "b", "c", "d"])
    assert max(len(line) for line in table.text.split("\n")) <= 88
    assert table.text.count("word") == 2 * words


def test_a_table_that_cannot_fit_is_refused() -> None:
    row = {f"column {i}": 10**12 for i in range(10)}
    with pytest.raises(ValueError, match=r"197 characters wide, and at most 88 fit: drop a column"):
        show.table([row])


def test_bad_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        show.table([])
    with pytest.raises(ValueError, match="need `columns`"):
        show.table([(1, 2)])
    with pytest.raises(ValueError, match=r"row 1 has 1 values for 2 columns \(a, b\): \[3\]"):
        show.table([(1, 2), (3,)], columns=["a", "b"])
    with pytest.raises(ValueError, match="no columns"):
        show.table([{}])


def test_compare_prints_one_line(capsys) -> None:
    assert show.compare("parameters", formula=16384, measured=16384) is None
    show.compare("payload", 4, 6.0, "MiB")
    show.compare("saved", formula=8.4, unit="GB", guess=None)
    show.compare("step", simulated=4, measured=5, unit="ms", guess=12)
    show.compare("step", 8, simulated=4)
    show.compare("sent", 0, 5)
    assert capsys.readouterr().out.splitlines() == [
        "parameters   formula 16,384   measured 16,384   ratio 1.000",
        "payload   formula 4 MiB   measured 6.000 MiB   ratio 1.500",
        "saved   your guess -   formula 8.400 GB",
        "step   your guess 12 ms   simulated 4 ms   measured 5 ms   ratio 1.250",
        "step   formula 8   simulated 4   ratio 0.500",
        "sent   formula 0   measured 5   ratio formula 0",
    ]


def test_compare_takes_numbers_alone() -> None:
    with pytest.raises(TypeError, match="measured value of 'x' is '3', a str; expected a number"):
        show.compare("x", 3, "3")
    with pytest.raises(TypeError, match="guess value of 'x' is '8 GB', a str"):
        show.compare("x", 3, guess="8 GB")
    with pytest.raises(ValueError, match="nothing to compare for 'x'"):
        show.compare("x", guess=3)


def test_comparison_is_a_table_with_ratios() -> None:
    table = show.comparison([("bytes", 1000, 1000, "B"), ("calls", 4, 5), ("none", 0, 0)])
    assert table.text.split("\n") == [
        "        formula   measured   unit   ratio",
        "------------------------------------------",
        "bytes     1,000      1,000   B       1.000",
        "calls         4          5           1.250",
        "none          0          0          both 0",
    ]
    simulated = show.comparison([("step", 4, 5)], columns=("simulated", "measured"))
    assert simulated.text.split("\n")[0].split() == ["simulated", "measured", "ratio"]
    with pytest.raises(TypeError, match="formula value of 'a' is None"):
        show.comparison([("a", None, 1)])


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (16384, 16384, "1.000"),
        (0, 0, "both 0"),
        (0, 5, "formula 0"),
        (4, 0, "0.000"),
        (10**9, 10**9 + 1, "1.000000001"),
        (10**5, 10**5 - 1, "0.99999"),
        (0.3, 0.1 + 0.2, "1.000"),
        (np.int64(8), np.int64(8), "1.000"),
    ],
)
def test_ratios(first: float, second: float, text: str) -> None:
    assert ratio_text(first, second) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (np.int32(1234), "1,234"),
        (0.0, "0"),
        (1.0, "1.000"),
        (0.98765, "0.9877"),
        (12345.6, "12,346"),
        (-2.5, "-2.500"),
        (1.5e-7, "1.50e-07"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(number: float, text: str) -> None:
    assert number_text(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1 MiB"),
        (16 * 2**20, "16 MiB"),
        (-5 * 2**30, "-5 GiB"),
        (8.03e9 * 16, "120 GiB"),
        (2**61, "2048 PiB"),
    ],
)
def test_bytes(number: float, text: str) -> None:
    assert bytes_text(number) == text


@pytest.mark.parametrize("bad", ["1", None, True, float("inf")])
def test_only_finite_numbers_are_bytes(bad) -> None:
    with pytest.raises(TypeError, match="finite number of bytes"):
        bytes_text(bad)
