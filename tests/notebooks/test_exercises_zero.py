"""Lesson 07's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("07_zero")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "stays and is divided": (
        "ranks_needed",
        "budget_bytes - (16 - cut) * num_params",
        "budget_bytes",
        "128 GB on each rank",
    ),
    "rounded down": ("ranks_needed", "-(-cut * num_params // room)", "cut * num_params // room",
                     "round up"),
    "grads from stage 1 on": ("ranks_needed", "1: 12", "1: 14", "32 GB stay"),
    "never impossible": ("ranks_needed", "return None", "return 10**6", "found 1000000"),
    "without the master": ("ranks_needed", "(16 - cut)", "(12 - cut)", "ranks_needed"),
    "a search that stops at 999 ranks": (
        "ranks_needed",
        "    return -(-cut * num_params // room)",
        "    found = -(-cut * num_params // room)\n    return found if found < 1000 else None",
        "expected 1120",
    ),
    "shard off by one": ("my_shard", "flat[rank * length :]", "flat[rank * length + 1 :]",
                         "rank r"),
    "one short": ("my_shard", "][:length]", "][: length - 1]", "rank r"),
    "remainder lost": ("my_shard", "-(-flat.numel() // world_size)", "flat.numel() // world_size",
                       "shape"),
    "not padded": ("my_shard", "return mine", "return part", "shape"),
    "padded in front": ("my_shard", "mine[: part.numel()] = part",
                        "mine[length - part.numel() :] = part", "zeros where"),
    "always FP32": ("my_shard", "flat.new_zeros(length)", "torch.zeros(length)",
                    "the dtype of what it is cut from"),
    "always FP64": ("my_shard", "flat.new_zeros(length)", "torch.zeros(length).double()",
                    "the dtype of what it is cut from"),
    "a view": ("my_shard", "    return mine",
               "    whole = torch.cat([flat, flat.new_zeros(world_size * length - flat.numel())])\n"
               "    return whole[rank * length :][:length]", "a slice is a view"),
    "missing average": ("reduce_and_free", ".div_(world_size)", "", "divide by the number"),
    "un-freed gradient": ("reduce_and_free", "param.grad = None", "pass",
                          "parameters with a full gradient left"),
    "zeroed, not freed": ("reduce_and_free", "param.grad = None", "param.grad.zero_()",
                          "param.grad = None"),
    "kept in a list": (
        "reduce_and_free",
        "        param.grad = None",
        "        torch.__dict__.setdefault('_kept', []).append(param.grad)\n"
        "        param.grad = None",
        "still in memory",
    ),
    "a flat copy kept": ("reduce_and_free", "    return mine",
                         "    params[0].kept = whole\n    return mine", "still in memory"),
    "a window into the whole": (
        "reduce_and_free",
        "    return mine",
        "    length = len(mine)\n    whole[:length] = mine\n    return whole[:length]",
        "still in memory",
    ),
    "always FP64 gradients": ("reduce_and_free", "    return mine", "    return mine.double()",
                              "the gradients' own dtype"),
    "always FP32 gradients": ("reduce_and_free", "    return mine", "    return mine.float()",
                              "the gradients' own dtype"),
    "sent in FP32": (
        "reduce_and_free",
        "dist.reduce_scatter_single(mine, whole, group=group)",
        "wide = torch.promote_types(mine.dtype, torch.float32)\n"
        "    high = mine.to(wide)\n"
        "    dist.reduce_scatter_single(high, whole.to(wide), group=group)\n"
        "    mine = high.to(mine.dtype)",
        "their own dtype",
    ),
    "averaged over all ranks": (
        "reduce_and_free", "dist.get_world_size(group)", "dist.get_world_size()",
        "`mine` has room for",
    ),
    "all-reduce and slice": (
        "reduce_and_free",
        "dist.reduce_scatter_single(mine, whole, group=group)",
        "dist.all_reduce(whole)\n    mine = whole.chunk(world_size)[dist.get_rank()].clone()",
        "an all-reduce would send twice",
    ),
    "not padded gradients": ("reduce_and_free", "-numel % world_size", "0",
                             "28 numbers do not divide by 3 ranks: pad the flat tensor first"),
    "input first": ("reduce_and_free", "reduce_scatter_single(mine, whole",
                    "reduce_scatter_single(whole, mine", "the shard, comes first"),
    "too little room": ("reduce_and_free", "whole.numel() // world_size)",
                        "whole.numel() // world_size - 1)", "`mine` has room for"),
    "weights, not gradients": (
        "reduce_and_free",
        "*(param.grad for param in params)",
        "*params",
        "flatten each `param.grad`",
    ),
    "a call for each": (
        "reduce_and_free",
        "    dist.reduce_scatter_single(mine, whole, group=group)\n",
        "    for _ in params:\n"
        "        dist.reduce_scatter_single(mine, whole, group=group)\n",
        "one flat tensor needs one call",
    ),
    "the neighbour's shard": (
        "reduce_and_free",
        "dist.reduce_scatter_single(mine, whole, group=group)",
        "dist.reduce_scatter_single(mine, whole.roll(len(mine)))",
        "shard of the average",
    ),
    "gathered as FP64": ("gathered_linear", "return x @ weight.T",
                         "return (x @ weight.T).double()", "the shard's own dtype"),
    "stale gather": (
        "gathered_linear",
        "    def linear(x):\n"
        "        whole = shard.new_empty(shard.numel() * dist.get_world_size())\n"
        "        dist.all_gather_single(whole, shard)\n",
        "    whole = shard.new_empty(shard.numel() * dist.get_world_size())\n"
        "    dist.all_gather_single(whole, shard)\n\n"
        "    def linear(x):\n",
        "gather inside the function that you return",
    ),
    "gathered once, on first use": (
        "gathered_linear",
        "        whole = shard.new_empty(shard.numel() * dist.get_world_size())\n"
        "        dist.all_gather_single(whole, shard)\n",
        "        if not hasattr(linear, 'whole'):\n"
        "            linear.whole = shard.new_empty(shard.numel() * dist.get_world_size())\n"
        "            dist.all_gather_single(linear.whole, shard)\n"
        "        whole = linear.whole\n",
        "stale",
    ),
    "kept after use": (
        "gathered_linear",
        "        weight =",
        "        linear.kept = whole\n        weight =",
        "whole weights in memory after a call",
    ),
    "padding not dropped": ("gathered_linear", "whole[: shape[0] * shape[1]].view(shape)",
                            "whole[-shape[0] * shape[1] :].view(shape)", "drop the padding"),
    "padding forgotten": ("gathered_linear", "whole[: shape[0] * shape[1]].view(shape)",
                          "whole.view(shape)", "the weight is the first 15 numbers"),
    "norms added": ("clip_shards", "sum(shard.to(high).square().sum() for shard in shards)",
                    "sum(shard.norm() for shard in shards) ** 2", "add up the squares"),
    "over all ranks": ("clip_shards", "dist.all_reduce(square, group=group)",
                       "dist.all_reduce(square)", "has two of the four ranks"),
    "squares in BF16": ("clip_shards", "shard.to(high).square()", "shard.square()",
                        "add the squares up in float32"),
    "own norm only": ("clip_shards", "dist.all_reduce(square, group=group)",
                      "dist.all_reduce(square.clone())", "norm"),
    "an all-reduce a shard": (
        "clip_shards",
        "    square = sum(shard.to(high).square().sum() for shard in shards)\n"
        "    dist.all_reduce(square, group=group)",
        "    squares = [shard.square().sum() for shard in shards]\n"
        "    [dist.all_reduce(square) for square in squares]\n    square = sum(squares)",
        "one number is enough",
    ),
    "scaled up": ("clip_shards", ".clamp(max=1)", "", "untouched where it is not"),
    "norm after clipping": ("clip_shards", "return norm", "return norm.clamp(max=max_norm)",
                            "before clipping"),
    "not clipped": ("clip_shards", "shard *= (max_norm / (norm + 1e-6)).clamp(max=1)", "pass",
                    "change the shards in place"),
    "not in place": ("clip_shards", "shard *= (max_norm", "shard = shard * (max_norm",
                     "change the shards in place"),
}  # fmt: skip


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS
