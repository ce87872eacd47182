"""Lines, bars and memory: what is drawn where, and that texts neither overlap nor leave."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from playbook_utils import show
from playbook_utils.events import MemorySample
from playbook_utils.show.style import CATEGORY_COLORS, rank_color
from tests.show.drawn import boxes, flaws

MIB = 2**20


def test_lines_are_the_data_in_the_colour_of_their_meaning() -> None:
    picture = show.lines(
        {"rank 2": ([0, 1, 2], [3, 2, 1]), "grads": ([0, 1], [1, 1])}, xlabel="step", ylabel="loss"
    )
    (axes,) = picture.figure.axes
    first, second = axes.lines[:2]
    assert first.get_xydata().tolist() == [[0, 3], [1, 2], [2, 1]]
    assert first.get_color() == rank_color(2) and second.get_color() == CATEGORY_COLORS["grads"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")


@pytest.mark.parametrize("spacing", [0.0, 0.001, 1.0])
@pytest.mark.parametrize("level", [0.0, 50.0])
def test_labels_at_the_ends_of_lines_never_overlap(spacing: float, level: float) -> None:
    names = {f"a rather long label, number {i}" for i in range(8)} | {"the limit"}
    series = {name: ([1, 2], [0, level + spacing * i]) for i, name in enumerate(sorted(names)[:8])}
    picture = show.lines(series, xlabel="x", ylabel="y", hline={"the limit": level}, title="T")
    labels = boxes(picture, names)
    assert len(labels) == 9
    assert flaws(picture) == []
    (axes,) = picture.figure.axes
    assert all(box.x0 > axes.get_window_extent().x1 for _, box in labels)


def test_a_label_at_the_very_top_is_not_cut_off() -> None:
    """As in lesson 05: dashes above all lines, close to the upper end of a logarithmic axis."""
    ends = {"gloo": 0.8, "ring": 0.7, "doubling": 0.6}
    series = {name: ([1, 2], [1e-6, end]) for name, end in ends.items()}
    picture = show.lines(series, xlabel="x", ylabel="y", hline={"link": 1.0}, logy=True)
    assert flaws(picture) == []


def test_labels_are_in_the_order_of_the_lines_ends() -> None:
    series = {"low": ([1, 2], [5, 1.0]), "high": ([1, 2], [0, 1.01]), "top": ([1, 2], [0, 1.02])}
    placed = dict(boxes(show.lines(series, xlabel="x", ylabel="y"), set(series)))
    assert placed["low"].y1 <= placed["high"].y0 < placed["high"].y1 <= placed["top"].y0


def test_logarithmic_axes_show_the_values_that_were_measured() -> None:
    picture = show.lines(
        {"a": ([1, 8, 1024], [1, 10, 100])}, xlabel="ranks", ylabel="y", logx=True, logy=True
    )
    (axes,) = picture.figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "8", "1,024"]
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_a_line_of_one_point_is_a_point() -> None:
    (axes,) = show.lines({"a": ([1], [0])}, xlabel="x", ylabel="y").figure.axes
    assert axes.lines[0].get_marker() == "o"


def test_points_are_rings_on_their_line_and_none_without_one() -> None:
    series = {"a": ([1, 2], [1, 2]), "grads": ([1, 2], [3, 4])}
    points = {"grads": ([1, 1.5], [3, 3.5])}
    (axes,) = show.lines(series, xlabel="x", ylabel="y", points=points).figure.axes
    ring = axes.lines[2]
    assert ring.get_xydata().tolist() == [[1, 3], [1.5, 3.5]]
    assert ring.get_linestyle() == "None" and ring.get_markeredgecolor() == CATEGORY_COLORS["grads"]
    with pytest.raises(ValueError, match=r"points \['b'\] belong to no line"):
        show.lines(series, xlabel="x", ylabel="y", points={"b": ([1], [1])})
    with pytest.raises(ValueError, match="'a' has 2 xs and 1 ys"):
        show.lines(series, xlabel="x", ylabel="y", points={"a": ([1, 2], [1])})


def test_bad_lines_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one label"):
        show.lines({}, xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match="'a' has 2 xs and 1 ys"):
        show.lines({"a": ([1, 2], [1])}, xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match="'a' has 0 xs"):
        show.lines({"a": ([], [])}, xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match="y value 0, which a logarithmic axis cannot show"):
        show.lines({"a": ([1, 2], [1, 0])}, xlabel="x", ylabel="y", logy=True)


def test_stacked_bars_begin_where_the_last_ended() -> None:
    rows = {"ZeRO-0": {"params": 2 * MIB, "grads": 3 * MIB}, "ZeRO-2": {"grads": MIB, "params": 0}}
    picture = show.stacked_bars(rows, unit="bytes", limit=8 * MIB, limit_label="holds")
    (axes,) = picture.figure.axes
    found = [(b.get_x(), b.get_width(), to_hex(b.get_facecolor()).upper()) for b in axes.patches]
    params, grads = CATEGORY_COLORS["params"], CATEGORY_COLORS["grads"]
    assert found == [(0, 2, params), (2, 3, grads), (0, 1, grads), (1, 0, params)]
    texts = {text for text, _ in boxes(picture)}
    assert {"5 MiB", "1 MiB", "2 MiB", "3 MiB", "holds 8 MiB ", "MiB"} <= texts
    assert axes.lines[0].get_xdata() == [8, 8]


@pytest.mark.parametrize(("limit", "side"), [(6, -1), (4, 1)])
def test_the_limit_runs_through_no_text_of_a_bar(limit: int, side: int) -> None:
    picture = show.stacked_bars({"a": {"params": 1, "grads": 9}}, unit="GiB", limit=limit)
    ((_, box),) = boxes(picture, {"9"})
    (axes,) = picture.figure.axes
    edges = [axes.transData.transform((x, 0))[0] for x in (limit, 1 if side < 0 else 10)]
    assert (box.x0 + box.x1) / 2 == pytest.approx(sum(edges) / 2, abs=1)
    assert box.x1 < edges[0] if side < 0 else box.x0 > edges[0]


@pytest.mark.parametrize(("count", "largest"), [(1, 0), (2, 1), (9, 10**12)])
def test_bars_of_any_number_and_size_keep_their_texts(count: int, largest: int) -> None:
    rows = {
        f"a configuration with a long name {i}": {c: largest // (i + 1) for c in CATEGORY_COLORS}
        for i in range(count)
    }
    limited = {"limit": 5 * largest or 1, "limit_label": "H100"}
    for picture in (
        show.stacked_bars(rows, unit="bytes", title="What a rank holds", **limited),
        show.stacked_bars({name: {"one": largest} for name in rows}, unit="calls", title="T"),
    ):
        assert flaws(picture) == []


def test_bars_have_their_values_beside_them() -> None:
    rows = {"naive": {"a": 12345}, "one": {"b": 1}, "none": {"c": 0}}
    picture = show.stacked_bars(rows, unit="calls")
    (axes,) = picture.figure.axes
    assert [bar.get_width() for bar in axes.patches] == [12345, 1, 0]
    assert {"12,345", "1", "0", "naive"} <= {text for text, _ in boxes(picture)}
    with pytest.raises(ValueError, match="row 'a' has a negative value"):
        show.stacked_bars({"a": {"a": -1}}, unit="calls")
    with pytest.raises(ValueError, match="at least one row"):
        show.stacked_bars({}, unit="calls")


def samples(num_steps: int, moments: int = 4) -> list[MemorySample]:
    """Parameters of 2 MiB, activations that rise to their peak at the last moment but one."""
    return [
        MemorySample(step, f"moment {m}", 2 * MIB, 0, step * MIB, (m % (moments - 1)) * MIB)
        for step in range(num_steps)
        for m in range(moments)
    ]


def test_memory_stacks_categories_and_marks_peak_and_steps() -> None:
    picture = show.memory(samples(3), title="Memory")
    (axes,) = picture.figure.axes
    colors = [to_hex(area.get_facecolor()[0]).upper() for area in axes.collections]
    assert colors == [CATEGORY_COLORS[c] for c in ("params", "optimizer_states", "activations")]
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections]
    assert tops == [2, 4, 6]
    texts = {text for text, _ in boxes(picture)}
    assert {"peak 6 MiB", " step 0", " step 1", " step 2", "memory of rank 0 (MiB)"} <= texts
    assert [line.get_xdata()[0] for line in axes.lines] == [4, 8, 10]


@pytest.mark.parametrize(("num_steps", "edge"), [(50, 0.5), (51, 0.0)])
def test_white_edges_do_not_eat_the_spikes_of_many_samples(num_steps: int, edge: float) -> None:
    (axes,) = show.memory(samples(num_steps)).figure.axes
    assert {area.get_linewidth()[0] for area in axes.collections} == {edge}


@pytest.mark.parametrize(("num_steps", "moments"), [(1, 4), (2, 10), (5, 4), (20, 10)])
def test_memory_of_many_moments_stays_readable(num_steps: int, moments: int) -> None:
    picture = show.memory(samples(num_steps, moments), title="Memory")
    # Slanted labels don't overlap, but the boxes around them do.
    assert [flaw for flaw in flaws(picture) if "'moment" not in flaw] == []


def test_the_label_of_a_late_peak_stays_on_its_plot() -> None:
    picture = show.memory([MemorySample(0, f"moment {i}", i * MIB, 0, 0, 0) for i in range(4)])
    ((_, box),) = boxes(picture, {"peak 3 MiB"})
    (axes,) = picture.figure.axes
    assert box.x1 < axes.get_window_extent().x1


def test_memory_of_nothing_can_be_drawn() -> None:
    assert "peak 0 B" in {t for t, _ in boxes(show.memory([MemorySample(0, "s", 0, 0, 0, 0)]))}


def test_memory_of_several_ranks_is_refused() -> None:
    mixed = [MemorySample(0, "start", 1, 0, 0, 0, rank=rank) for rank in (0, 3)]
    with pytest.raises(ValueError, match=r"samples of ranks 0, 3; expected one rank"):
        show.memory(mixed)
    with pytest.raises(ValueError, match="samples of no rank"):
        show.memory([])
