"""The memory explorer in JupyterLab: a key moves a slider, and the numbers follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import MemoryEstimate, predict_memory
from playbook_utils.predict.presets import preset
from tests.browser.conftest import Lab, run_all_cells

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CELL = "from playbook_utils import show\nshow.memory_explorer('llama-3-8b', gpu='h100-sxm')"


@pytest.fixture(scope="module")
def page(lab: Lab, new_page: Callable[[], Any]) -> Iterator[Any]:
    """A notebook whose only cell, already run, shows the explorer."""
    page = new_page()
    page.goto(lab.write_notebook("explorer.ipynb", CELL))
    run_all_cells(page, lab)
    page.locator("div[role=img]").wait_for()
    yield page
    page.close()


def press(page: Any, slider: str, key: str) -> None:
    """Press a key on the handle of the slider with this label."""
    label = page.get_by_text(slider, exact=True)
    handle = page.locator(".widget-hslider", has=label).locator(".noUi-handle")
    handle.focus()
    handle.press(key)


def shows(page: Any, estimate: MemoryEstimate) -> None:
    """Wait until the table holds this estimate's bytes."""
    from playwright.sync_api import expect

    for name in ("params", "grads", "optimizer_states", "activations", "total", "peak"):
        cell = page.locator(f"[data-name={name}]")
        size = getattr(estimate, f"{name}_bytes")
        expect(cell).to_have_text(f"{size:,} bytes", timeout=30_000)


def predict(seq_len: int = 4096, **layout: Any) -> MemoryEstimate:
    return predict_memory(preset("llama-3-8b"), seq_len=seq_len, layout=ParallelLayout(**layout))


def test_an_arrow_key_on_a_slider_changes_the_numbers(page: Any) -> None:
    shows(page, predict())
    press(page, "sequence s", "ArrowRight")
    shows(page, predict(seq_len=8192))
    press(page, "tensor tp (t)", "ArrowRight")
    shows(page, predict(seq_len=8192, tp=2))
    press(page, "sequence s", "ArrowLeft")
    press(page, "tensor tp (t)", "Home")
    shows(page, predict())
    assert page.errors == []


def test_the_impossible_shows_a_sentence_until_it_is_possible_again(page: Any) -> None:
    press(page, "tensor tp (t)", "End")
    alert = page.locator("[role=alert]")
    alert.wait_for()
    assert 'tp is 64 and must divide "heads a", 32' in alert.inner_text()
    assert page.locator("div[role=img]").count() == 0
    press(page, "tensor tp (t)", "Home")
    shows(page, predict())
    assert page.locator("[role=alert]").count() == 0
    assert page.errors == []


def test_as_drawn_by_the_browser_no_text_is_cut_off(page: Any) -> None:
    wide = page.locator("div[role=img], div[role=img] div").evaluate_all(
        "all => all.filter(box => box.scrollWidth > box.clientWidth + 2)"
        ".map(box => box.textContent)"
    )
    assert wide == []
    names = page.locator("[data-part]").evaluate_all("all => all.map(part => part.textContent)")
    assert len(names) > 20 and "optimizer states" in names


def test_on_a_small_laptop_the_three_groups_stand_side_by_side(page: Any) -> None:
    page.set_viewport_size({"width": 1366, "height": 768})
    page.get_by_text("Training", exact=True).scroll_into_view_if_needed()
    headings = [
        page.get_by_text(title, exact=True).bounding_box()
        for title in ("Model", "Training", "Parallelism")
    ]
    assert len({round(box["y"]) for box in headings}) == 1
    labels = page.locator(".widget-label, .widget-label-basic").evaluate_all(
        "all => all.filter(label => label.scrollWidth > label.clientWidth)"
        ".map(label => label.textContent)"
    )
    assert labels == [], "labels that are cut off"
    verdict = page.locator("b", has_text="Does not fit h100-sxm").bounding_box()
    assert verdict["y"] < page.locator("div[role=img]").bounding_box()["y"]
    page.set_viewport_size({"width": 1200, "height": 1500})
    assert page.errors == []


def test_the_differences_from_the_book_unfold(page: Any) -> None:
    item = page.locator("details li").first
    assert not item.is_visible()
    page.locator("details summary").click()
    item.wait_for()
    assert "The book's:" in item.inner_text()
    assert page.errors == []
