"""Sliders around a function."""

from __future__ import annotations

import sys

import ipywidgets

from playbook_utils import show


def test_explore_calls_the_function_with_the_controls_values(monkeypatch) -> None:
    calls = []
    made = []
    monkeypatch.setattr("ipywidgets.widgets.interaction.display", made.append)
    show.explore(lambda **values: calls.append(values), stages=(2, 16), schedule=["1F1B", "AFAB"])
    (box,) = [widget for widget in made if isinstance(widget, ipywidgets.interactive)]
    slider, menu, _ = box.children
    assert (slider.min, slider.max) == (2, 16) and menu.options == ("1F1B", "AFAB")
    slider.value = 5
    assert calls[-1] == {"stages": 5, "schedule": "1F1B"}


def test_without_ipywidgets_the_first_values_are_shown(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    show.explore(lambda a, b, c: f"{a} {b} {c}", a=(2, 16), b=["x", "y"], c=True)
    out = capsys.readouterr().out
    assert "pip install ipywidgets" in out and "a=2, b=x, c=True" in out and "2 x True" in out
