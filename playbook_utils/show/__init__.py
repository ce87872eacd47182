"""Figures, tables and sliders, all by one hand: one colour by meaning, one per rank.

Figures are `Picture` objects: the last value of a cell is displayed once, with a description in
words. Tables are plain text.

Left out: measuring and predicting what is shown.

    from playbook_utils import show

    show.timeline(spans, title="Backward hides the all-reduce")
    show.compare("all_reduce bytes", predicted=393_216, measured=393_216)
"""

from playbook_utils.show.accumulation import accumulation_diagram
from playbook_utils.show.attention import attention_tiles
from playbook_utils.show.by_size import by_size
from playbook_utils.show.diagrams import Canvas, batch_split, course_map, data_parallel_diagram
from playbook_utils.show.estimates import memory_bars
from playbook_utils.show.explorer import memory_explorer
from playbook_utils.show.fusion import fusion_diagram
from playbook_utils.show.gpu import gpu_diagram
from playbook_utils.show.launch import requests, thread_grid
from playbook_utils.show.pieces import origin_code, origins, pieces
from playbook_utils.show.plots import bars, lines, memory, stacked_bars
from playbook_utils.show.program_lanes import program_lanes
from playbook_utils.show.recomputation import recomputation_diagram
from playbook_utils.show.roofline import roofline
from playbook_utils.show.sharding import zero_diagram
from playbook_utils.show.style import Picture, color_of, rank_color
from playbook_utils.show.tables import Table, compare, comparison, table
from playbook_utils.show.timeline import timeline
from playbook_utils.show.traffic import traffic, traffic_matrix
from playbook_utils.show.training_step import training_step
from playbook_utils.show.units import bytes_text
from playbook_utils.show.waits import without_waits
from playbook_utils.show.widgets import explore

__all__ = [
    "Canvas",
    "Picture",
    "Table",
    "accumulation_diagram",
    "attention_tiles",
    "bars",
    "batch_split",
    "by_size",
    "bytes_text",
    "color_of",
    "compare",
    "comparison",
    "course_map",
    "data_parallel_diagram",
    "explore",
    "fusion_diagram",
    "gpu_diagram",
    "lines",
    "memory",
    "memory_bars",
    "memory_explorer",
    "origin_code",
    "origins",
    "pieces",
    "program_lanes",
    "rank_color",
    "recomputation_diagram",
    "requests",
    "roofline",
    "stacked_bars",
    "table",
    "thread_grid",
    "timeline",
    "traffic",
    "traffic_matrix",
    "training_step",
    "without_waits",
    "zero_diagram",
]
