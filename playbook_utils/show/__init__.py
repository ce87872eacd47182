"""Figures, tables and sliders, all by one hand: one colour by meaning, one per rank.

Figures are `Picture` objects: the last value of a cell is displayed once, with a description in
words. Tables are plain text. A figure that one lesson draws is in `lessons`, in that lesson's file;
each name is loaded when it is first asked for.

Left out: measuring and predicting what is shown.

    from playbook_utils import show

    show.timeline(spans, title="Backward hides the all-reduce")
    show.compare("all_reduce bytes", formula=393_216, measured=393_216)
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "canvas": ("Canvas",),
    "estimates": ("memory_bars",),
    "explorer": ("memory_explorer",),
    "messages": ("traffic",),
    "plots": ("lines", "memory", "stacked_bars"),
    "rooflines": ("roofline",),
    "style": ("Picture", "color_of", "rank_color"),
    "tables": ("Table", "compare", "comparison", "table"),
    "timelines": ("timeline",),
    "units": ("bytes_text",),
    "lessons.activation_recomputation": ("recomputation_diagram",),
    "lessons.collectives": ("all_reduce_diagram", "origin_code", "origins", "pieces"),
    "lessons.data_parallelism": ("batch_split", "data_parallel_diagram"),
    "lessons.flash_attention": ("attention_tiles",),
    "lessons.fused_kernels_and_triton": ("fusion_diagram", "program_lanes"),
    "lessons.gpus_and_cuda_kernels": ("gpu_diagram", "requests", "thread_grid"),
    "lessons.gradient_accumulation": ("accumulation_diagram",),
    "lessons.memory_profiling": ("training_step",),
    "lessons.start_here": ("course_map", "ring"),
    "lessons.zero": ("gathers_and_scatters", "zero_diagram"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"show has no name {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
