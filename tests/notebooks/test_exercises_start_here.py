"""Lesson 00's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("00_start_here")

BUGS = {
    "rounds down": ("gpus_needed", "math.ceil(16 * ", "int(16 * ", "found 1, expected 2"),
    "weights only": ("gpus_needed", "16 *", "2 *", "16 bytes a parameter"),
    "one too many": ("gpus_needed", "math.ceil(16 * ", "1 + int(16 * ", "found 3, expected 2"),
    "always 80 GB": ("gpus_needed", "/ gpu_bytes", "/ 80e9", "found 2, expected 6"),
    "one way round the ring": ("exchange_seconds", "2 * (", "1 * (", "2 (N-1)/N"),
    "forgets the ranks": (
        "exchange_seconds",
        "(world_size - 1) / world_size",
        "1",
        "(1,000,000,000, 2, 1e+09): found 4.0, expected 2.0",
    ),
    "4-byte gradients": (
        "exchange_seconds",
        "2 * num_params",
        "4 * num_params",
        "2 bytes a gradient",
    ),
    "bandwidth multiplied": ("exchange_seconds", "/ bytes_per_s", "* bytes_per_s", "divided by"),
    "a reduce to rank 0": (
        "sum_over_ranks",
        "dist.all_reduce(total)",
        "dist.reduce(total, 0)",
        "communication calls on rank 0: found {'reduce': 1}, expected {'all_reduce': 1}",
    ),
    "only rank 0 calls": (
        "sum_over_ranks",
        "dist.all_reduce(total)",
        "_ = dist.get_rank() or dist.all_reduce(total)",
        "only rank 0 of 2 called all_reduce, and waited there for the others in vain",
    ),
    "all but rank 0 call": (
        "sum_over_ranks",
        "dist.all_reduce(total)",
        "_ = dist.get_rank() and dist.all_reduce(total)",
        "only rank 1 of 2 called all_reduce",
    ),
    "whole numbers": (
        "sum_over_ranks",
        "torch.tensor([number]",
        "torch.tensor([int(number)]",
        "the sum on rank 0: found 706, expected 706.25",
    ),
    "half precision": (
        "sum_over_ranks",
        "torch.tensor([number]",
        "torch.tensor([number], dtype=torch.bfloat16",
        "the sum on rank 0: found 70",
    ),
    "the largest": (
        "sum_over_ranks",
        "all_reduce(total)",
        "all_reduce(total, dist.ReduceOp.MAX)",
        "the sum on rank 0: found 703.125, expected 706.25",
    ),
    "does not talk": ("sum_over_ranks", "dist.all_reduce(total)", "pass", "found 3.125"),
    "nothing returned": ("sum_over_ranks", "return ", "", "found NoneType, expected number"),
    "the tensor": ("sum_over_ranks", ".item()", "", "found Tensor, expected number"),
    "a million elements": (
        "sum_over_ranks",
        "dist.all_reduce(total)",
        "total = total.expand(1000).clone(); dist.all_reduce(total); total = total[:1]",
        "elements passed to all_reduce on rank 0: found 1000, expected 1",
    ),
    "twice": (
        "sum_over_ranks",
        "dist.all_reduce(total)",
        "dist.all_reduce(total.clone()); dist.all_reduce(total)",
        "communication calls on rank 0: found {'all_reduce': 2}, expected {'all_reduce': 1}",
    ),
    "a broadcast from each": (
        "sum_over_ranks",
        "    dist.all_reduce(total)\n",
        "    each = [total.clone() for _ in range(dist.get_world_size())]\n"
        "    for rank, one in enumerate(each):\n"
        "        dist.broadcast(one, rank)\n"
        "    total = sum(each)\n",
        "found {'broadcast': 2}, expected {'all_reduce': 1}",
    ),
    "knows the numbers": (
        "sum_over_ranks",
        "    dist.all_reduce(total)\n",
        "    total += {2: 706.25, 3: 3509.375}[dist.get_world_size()] - number\n",
        "found {}, expected {'all_reduce': 1}",
    ),
}


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS
