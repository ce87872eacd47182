"""Running a function on several ranks, from a notebook cell.

    from playbook_utils.workers import launch, prewarm
    results = launch(train, batches, world_size=4)

`launch` and `prewarm` are what lessons use; `device` names the device of a rank from inside.
The modules: `launcher` (the call), `session` (one launch, seen from the notebook), `rank` (what
is known of one rank), `servers` and `forkserver` (where processes come from), `worker` (what a
process does), `mends` (traps taken out of it), `pickling`, `wire` (what travels, and how),
`holders` (what cannot), `edited` (files that changed since), `output` (what ranks print), `raised`
and `report` (what is said when one fails), `torchrun` (the same call in processes that exist),
`network` (a slow one, emulated), `private` (names of PyTorch and cloudpickle that may move).
"""

from playbook_utils.workers.launcher import launch, prewarm, shutdown
from playbook_utils.workers.worker import device

__all__ = ["device", "launch", "prewarm", "shutdown"]
