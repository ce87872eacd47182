"""Lesson 01's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from typing import Any

import torch

from tests.notebooks.exercises import Lesson, ThreeWays, plant, run_cell

LESSON = Lesson.read("01_memory_profiling")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "a tied head counted twice": ("count_params", "1 if config.tied else 2", "2", "once"),
    "the head forgotten": ("count_params", "(1 if config.tied else 2)", "1", "embedding and head"),
    "heads not grouped": (
        "count_params",
        "config.num_kv_heads * dim // config.num_heads",
        "dim",
        "keys and values have num_kv_heads heads",
    ),
    "the last norm forgotten": ("count_params", " * layer + dim", " * layer", "2 norms"),
    "one norm a layer": ("count_params", "+ 2 * dim\n", "+ dim\n", "2 norms"),
    "GPT's MLP": ("count_params", "3 * dim * config.ff_dim", "2 * dim * config.ff_dim", "3 of"),
    "a model is built": (
        "count_params",
        "    dim = config.dim\n",
        "    return num_params(Decoder(config))\n    dim = config.dim\n",
        "a model was built",
    ),
    "a fraction": ("count_params", "dim // config", "dim / config", "a count is a whole number"),
    "no master copy": ("training_bytes", "each += 4  # master copy", "pass", "master copy"),
    "a master copy of FP32": (
        "training_bytes",
        "if weight_bytes == 2:",
        "if weight_bytes:",
        "FP32: weight, gradient, two moments",
    ),
    "moments in the weights' precision": (
        "training_bytes",
        "4 * moments",
        "weight_bytes * moments",
        "moments stay 4 bytes",
    ),
    "FP32 gradients instead of the others": (
        "training_bytes",
        "each += 4 if fp32_grads",
        "each += 2 if fp32_grads",
        "on top of the 2-byte ones",
    ),
    "always Adam": ("training_bytes", "4 * moments", "8", "keeps nothing of its own"),
    "the dropout's output": (
        "saved_bytes",
        "2 * num_heads * seq_len",
        "4 * num_heads * seq_len",
        "two pairs share a tensor",
    ),
    "ReLU's input too": ("saved_bytes", "2 * dim + 2 * ff_dim", "2 * dim + 4 * ff_dim", "share"),
    "masks": ("saved_bytes", "mlp = 2 * dim", "mlp = 3 * dim", "operator by operator"),
    "a fixed width": ("saved_bytes", "2 * ff_dim", "8 * dim", "not always four times"),
    "no statistics": ("saved_bytes", "2 * dim + 2 * 2", "2 * dim", "operator by operator"),
    "heads forgotten": ("saved_bytes", "2 * num_heads * seq_len", "2 * seq_len", "each head"),
    "a block is built and measured": (
        "saved_bytes",
        "    tokens = seq_len * batch_size\n",
        "    block = exercises._ReluBlock(dim, num_heads, ff_dim).to(torch.bfloat16)\n"
        "    x = torch.zeros(batch_size, seq_len, dim, dtype=torch.bfloat16, requires_grad=True)\n"
        "    with saved_for_backward(block) as saved:\n"
        "        block(x)\n"
        "    return saved.total_bytes\n"
        "    tokens = seq_len * batch_size\n",
        "a model was built",
    ),
    "one sequence": ("saved_bytes", "seq_len * batch_size", "seq_len", "three sequences"),
    "all is proportional": (
        "largest_microbatch",
        "(budget_bytes - fixed) // each",
        "budget_bytes // (low // 8)",
        "fixed part",
    ),
    "rounded up": ("largest_microbatch", "// each)", "// each + 1)", "expected 23"),
    "never nothing": ("largest_microbatch", "max(0, ", "max(1, ", "the answer is 0"),
    "run until it fails": (
        "largest_microbatch",
        "    low, high = peak_bytes(8), peak_bytes(16)\n",
        "    n = 0\n"
        "    while peak_bytes(n + 1) <= budget_bytes:\n"
        "        n += 1\n"
        "    return n\n"
        "    low = high = 0\n",
        "two runs say all",
    ),
    "a huge run": ("largest_microbatch", "peak_bytes(16)", "peak_bytes(1000)", "1 to 64"),
    "graphs kept": ("evaluate", "with torch.no_grad():", "if True:", "nobody calls backward"),
    "autograd stays off": (
        "evaluate",
        "with torch.no_grad():",
        "torch.set_grad_enabled(False)\n    if True:",
        "torch.is_grad_enabled() afterwards",
    ),
    "dropout on": ("evaluate", "model.eval()", "pass", "dropout switched off"),
    "left in eval": ("evaluate", "    model.train()\n", "", "training goes on"),
    "only the top module back": (
        "evaluate",
        "    model.train()\n",
        "    model.training = True\n",
        "every module inside",
    ),
    "one forward over all rows": (
        "evaluate",
        "        losses = [",
        "        batches = [tuple(torch.cat(part) for part in zip(*batches))]\n        losses = [",
        "one forward for each",
    ),
    "a tensor": ("evaluate", ".mean().item()", ".mean()", "makes a number"),
    "the last loss": ("evaluate", "torch.stack(losses).mean()", "losses[-1]", "the mean over"),
    "a sum": ("evaluate", ".mean().item()", ".sum().item()", "the mean over"),
}


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS

    def test_item_frees_the_graph_but_it_was_made(self, names: dict[str, Any]) -> None:
        """.item() leaks nothing, and yet each batch kept what no backward would read."""
        source = plant(LESSON.solution("evaluate"), "with torch.no_grad():", "if True:")
        source = plant(source, "model(tokens), targets)", "model(tokens), targets).detach()")
        result = run_cell(source, names)
        assert result.status == "failed" and "bytes kept for a backward pass" in result.text

    def test_autograd_is_on_again_after_an_attempt_that_left_it_off(
        self, names: dict[str, Any]
    ) -> None:
        off = "    torch.set_grad_enabled(False)\n    return 0.0\n    model.eval()\n"
        source = plant(LESSON.solution("evaluate"), "    model.eval()\n", off)
        assert run_cell(source, names).status == "failed" and torch.is_grad_enabled()
        source = plant(source, "return 0.0", "raise RuntimeError")
        assert run_cell(source, names).status == "failed" and torch.is_grad_enabled()

    def test_bisection_needs_too_many_runs(self, names: dict[str, Any]) -> None:
        source = plant(
            LESSON.solution("largest_microbatch"),
            "    low, high = peak_bytes(8), peak_bytes(16)\n",
            "    low, high = 0, 64\n"
            "    while high - low > 1:\n"
            "        middle = (low + high) // 2\n"
            "        fits = peak_bytes(middle) <= budget_bytes\n"
            "        low, high = (middle, high) if fits else (low, middle)\n"
            "    return low\n",
        )
        result = run_cell(source, names)
        assert result.status == "failed" and "found more than 4 runs" in result.text

    def test_one_more_run_to_check_the_line_is_allowed(self, names: dict[str, Any]) -> None:
        source = plant(
            LESSON.solution("largest_microbatch"),
            "    return max(0, (budget_bytes - fixed) // each)\n",
            "    n = max(0, (budget_bytes - fixed) // each)\n"
            "    assert n == 0 or peak_bytes(n) <= budget_bytes < peak_bytes(n + 1)\n"
            "    return n\n",
        )
        assert run_cell(source, names).passed
