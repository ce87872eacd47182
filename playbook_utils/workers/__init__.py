"""Running a function on several ranks, from a notebook cell.

    from playbook_utils.workers import launch, prewarm
    results = launch(train, batches, world_size=4)

`launch` and `prewarm` are what lessons use; `device` names a rank's device; `network` slows links.
"""

from playbook_utils.workers.launcher import launch, prewarm, shutdown
from playbook_utils.workers.worker import device

__all__ = ["device", "launch", "prewarm", "shutdown"]
