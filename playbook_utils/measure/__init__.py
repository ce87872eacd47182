"""What a run really did: what it sent, held, saved and when; one module a subject.

`private` holds the private names of PyTorch that these rest on.

Left out: predictions (`playbook_utils.predict`), drawing (`playbook_utils.show`), and what happens
inside a kernel (`kernels.emulator`, `kernels.triton.programs`).
"""

from playbook_utils.measure.chrome import spans_from_profiler, write_chrome_trace
from playbook_utils.measure.communication import CommunicationLog, record_communication
from playbook_utils.measure.cost import StepCost, count_flops, step_cost
from playbook_utils.measure.memory import MemoryLog, state_bytes, track_memory
from playbook_utils.measure.operators import OperatorLog, record_operators
from playbook_utils.measure.saved import saved_for_backward
from playbook_utils.measure.timing import Timing, measure_time
from playbook_utils.measure.traces import (
    TraceRecorder,
    exposed_communication_s,
    merge_spans,
    overlap_s,
)

__all__ = [
    "CommunicationLog", "MemoryLog", "OperatorLog", "StepCost", "Timing", "TraceRecorder",
    "count_flops", "exposed_communication_s", "measure_time", "merge_spans", "overlap_s",
    "record_communication", "record_operators", "saved_for_backward", "spans_from_profiler",
    "state_bytes", "step_cost", "track_memory", "write_chrome_trace",
]  # fmt: skip
