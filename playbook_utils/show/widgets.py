"""Sliders around a function, for what a reader may want to turn.

A saved notebook does not show widgets, so a cell with the same function at fixed values comes
first.

    show.explore(draw_bubble, num_stages=(2, 16), num_microbatches=(1, 64))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["explore"]


def explore(function: Callable[..., Any], **controls: Any) -> None:
    """Show controls that call `function` and display what it returns, each time one is moved.

    controls: per argument a (smallest, largest) or (smallest, largest, step) for a slider, a list
    for a menu, a bool for a tick box: the abbreviations of `ipywidgets.interact`. Without
    ipywidgets, `function` is shown once for the first value of each.
    """
    from IPython.display import display

    try:
        import ipywidgets
    except ImportError:
        values = {name: _first(control) for name, control in controls.items()}
        at = ", ".join(f"{name}={value}" for name, value in values.items())
        print(f"No sliders: `pip install ipywidgets` and restart the kernel. Shown: {at}")
        display(function(**values))  # type: ignore[no-untyped-call]
        return
    ipywidgets.interact(function, **controls)


def _first(control: Any) -> Any:
    return control[0] if isinstance(control, (tuple, list)) else control
