"""The book's own numbers, and the rules by which they come about.

    charts         its memory charts, each bar reproduced exactly
    widget         the memory calculator on its first page, faults included
    zero_pairs     its paired runs with and without ZeRO-1
    korthikanti    the paper behind its section on sequence parallelism: figure 7

The numbers themselves are in `facts/`, or in the module. The names of `charts` are here, too.
"""

from playbook_utils.predict.book.charts import (
    BOOK_MODELS,
    CHARTS,
    CONVENTIONS,
    ROUNDED_PARAMS_GIB,
    ChartRow,
    Convention,
    book_facts,
    book_params,
    chart,
    gpt_shape,
    predict_chart_row,
)

__all__ = [
    "BOOK_MODELS",
    "CHARTS",
    "CONVENTIONS",
    "ROUNDED_PARAMS_GIB",
    "ChartRow",
    "Convention",
    "book_facts",
    "book_params",
    "chart",
    "gpt_shape",
    "predict_chart_row",
]
