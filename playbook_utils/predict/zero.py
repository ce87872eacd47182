"""What ZeRO leaves on a rank, and what it needs whole for a moment.

    states_bytes({"mlp": 1000}, 12, from_stage=1, layout=ParallelLayout(dp=8, zero_stage=1))
    unit_bytes({"mlp": 1000}, 2, ParallelLayout(dp=8, zero_stage=3))     # 4,000

Stage 1 shards the optimizer states, 2 the gradients too, 3 the params too (Rajbhandari et al.
2020, section 5), over dp x cp ranks and experts over dp x cp / ep. Where that is one rank nothing
is sharded, and nothing gathered.

Left out: prefetching (one unit more), buckets that are no whole unit, hierarchical shards.
"""

from __future__ import annotations

from collections.abc import Mapping

from playbook_utils.predict.layout import ParallelLayout

__all__ = ["gathered_bytes", "states_bytes", "unit_bytes"]


def states_bytes(
    params: Mapping[str, int], bytes_each: int, from_stage: int, layout: ParallelLayout
) -> dict[str, int]:
    """Bytes by part, each rounded up, sharded where ZeRO's stage is at least `from_stage`."""
    sharded = layout.zero_stage >= from_stage
    return {
        part: -(-count // (_ways(part, layout) if sharded else 1)) * bytes_each
        for part, count in params.items()
    }


def gathered_bytes(params: Mapping[str, int], bytes_each: int, layout: ParallelLayout) -> int:
    """Params of one unit that ZeRO-3 gathers while it is computed."""
    return _whole_bytes(params, bytes_each, layout) if layout.zero_stage == 3 else 0


def unit_bytes(params: Mapping[str, int], bytes_each: int, layout: ParallelLayout) -> int:
    """The same in the backward pass, where from ZeRO-2 on the unit's gradient is whole as well
    before it is reduced; it has the weights' precision."""
    gradient = _whole_bytes(params, bytes_each, layout) if layout.zero_stage >= 2 else 0
    return gathered_bytes(params, bytes_each, layout) + gradient


def _ways(part: str, layout: ParallelLayout) -> int:
    return layout.expert_replicas if part == "experts" else layout.replicas


def _whole_bytes(params: Mapping[str, int], bytes_each: int, layout: ParallelLayout) -> int:
    """Of the parts that are sharded at all."""
    return bytes_each * sum(count for part, count in params.items() if _ways(part, layout) > 1)
