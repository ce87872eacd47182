"""Pipeline stages: which layers a rank holds, and how many micro-batches it keeps at once.

    layers_of(5, ParallelLayout(pp=2), stage=0)                       # (range(0, 3),)
    peak_in_flight(ParallelLayout(pp=4, num_microbatches=8), stage=0, chunk_bytes=[1])   # (4,)

Layers that do not divide evenly go to the first chunks, one more each, unless the layout says
otherwise (`layers_per_chunk`). Both are seen: Llama 3 405B puts one layer fewer on its first and on
its last stage, which also hold the embedding and the head (arXiv:2407.21783, section 3.3.2), and
Megatron-LM refuses an uneven split unless it is told how many layers go there. An interleaved
schedule cuts the layers into pp x v chunks, of which rank r holds r, r + pp, r + 2 pp, ...

A micro-batch is kept from its forward pass through a chunk to its backward pass there. At most,
on rank r of p, with m micro-batches:
    afab              m                                       (Huang et al. 2019, GPipe)
    1f1b              min(m, p - r)                           (Narayanan et al. 2019, PipeDream)
    interleaved_1f1b  min(m v, 2 (p - r - 1) + (v - 1) p + 1) chunks: Megatron-LM's warm-up and
                      one more; on rank 0 they are p (1 + (p - 1) / (p v)) micro-batches of its
                      layers (Korthikanti et al. 2022, section 4.2.3)
With one stage no schedule matters: a micro-batch's backward pass follows its forward pass.

Left out: zero-bubble schedules and DualPipe, which keep parts of an activation longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from playbook_utils.predict._checks import whole
from playbook_utils.predict.layout import ParallelLayout

__all__ = ["layers_of", "peak_in_flight"]


def layers_of(num_layers: int, layout: ParallelLayout, stage: int) -> tuple[range, ...]:
    """The layers on that stage, one range for each of its chunks.

    Raises:
        ValueError: `stage` is not one of 0 to pp - 1, or `layers_per_chunk` does not add up to
            `num_layers`.
    """
    whole("num_layers", num_layers, minimum=1)
    _check_stage(layout, stage)
    each, more = divmod(num_layers, layout.chunks)
    split = layout.layers_per_chunk
    if split is None:
        split = tuple(each + (chunk < more) for chunk in range(layout.chunks))
    if sum(split) != num_layers:
        raise ValueError(
            f"layers_per_chunk adds up to {sum(split)}: expected num_layers={num_layers}"
        )
    ends = list(accumulate(split, initial=0))
    return tuple(
        range(ends[chunk], ends[chunk + 1]) for chunk in range(stage, layout.chunks, layout.pp)
    )


def peak_in_flight(
    layout: ParallelLayout, stage: int, chunk_bytes: Sequence[int]
) -> tuple[int, ...]:
    """Micro-batches kept of each of the stage's chunks at the moment when they take most memory.

    Args:
        chunk_bytes: what one micro-batch keeps in each chunk; decides only where chunks differ.
    """
    _check_stage(layout, stage)
    if len(chunk_bytes) != layout.virtual_stages:
        raise ValueError(
            f"found {len(chunk_bytes)} chunk_bytes; expected one for each of the "
            f"{layout.virtual_stages} chunks of a stage"
        )
    m, p = layout.microbatches, layout.pp
    if p == 1:
        return (1,) * layout.virtual_stages
    if layout.schedule == "afab":
        return (m,)
    if layout.schedule == "1f1b":
        return (min(m, p - stage),)
    return _interleaved(layout, stage, chunk_bytes)


def _check_stage(layout: ParallelLayout, stage: object) -> None:
    if type(stage) is not int or not 0 <= stage < layout.pp:
        raise ValueError(f"stage is {stage!r}; expected one of 0 to pp - 1 = {layout.pp - 1}")


def _interleaved(layout: ParallelLayout, stage: int, chunk_bytes: Sequence[int]) -> tuple[int, ...]:
    p, v = layout.pp, layout.virtual_stages
    total = layout.microbatches * v
    warm_up = min(total, 2 * (p - stage - 1) + (v - 1) * p)
    first = min(total, warm_up + 1)
    rounds, rest = divmod(first, p * v)
    counts = [rounds * p + min(p, max(0, rest - chunk * p)) for chunk in range(v)]
    if len(set(chunk_bytes)) == 1:
        return tuple(counts)
    # One backward pass, one forward pass, in turn; after p v of each, all is as it was.
    best = tuple(counts)
    most = _weigh(counts, chunk_bytes)
    for done in range(min(total - first, p * v)):
        counts[v - 1 - done % (p * v) // p] -= 1
        counts[(first + done) % (p * v) // p] += 1
        now = _weigh(counts, chunk_bytes)
        if now > most:
            best, most = tuple(counts), now
    return best


def _weigh(counts: Sequence[int], chunk_bytes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(counts, chunk_bytes, strict=True))
