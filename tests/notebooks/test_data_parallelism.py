"""The techniques of lesson 06, imported from its cells, against one process.

The lesson shows them at 2 and 4 ranks; here they meet other world sizes, odd batches, subgroups,
unused parameters, bfloat16 and gradient buffers that survive a step.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.data_parallelism import (
    AccumulatingDDP,
    BucketedDDP,
    NaiveDDP,
    OverlappedDDP,
    accumulate,
    make_buckets,
    train_steps,
)
from playbook_utils.checks import assert_same_training, record_training
from playbook_utils.commands.export import export_script
from playbook_utils.data import GeneratedLanguage, shard_batch
from playbook_utils.errors import LaunchError, NotEquivalent
from playbook_utils.measure import record_communication
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy, num_params
from playbook_utils.predict.communication import wire_bytes
from playbook_utils.workers import launch

SMALL = partial(BucketedDDP, bucket_bytes=20_000)
RUNGS: dict[str, Callable] = {
    "naive": NaiveDDP,
    "overlapped": OverlappedDDP,
    "one": BucketedDDP,
    "small": SMALL,
    "accumulating": AccumulatingDDP,
}
CONFIG = DecoderConfig.tiny(dim=24, num_heads=4, ff_dim=40, vocab_size=65)
LANGUAGE = GeneratedLanguage(vocab_size=65)
BATCHES = [LANGUAGE.batch(step, batch_size=30, seq_len=7) for step in range(3)]


def plain() -> nn.Module:
    return Decoder(CONFIG).double()


def tied_and_frozen() -> nn.Module:
    model = Decoder(DecoderConfig.tiny(dim=24, ff_dim=40, vocab_size=65, tied=True)).double()
    model.layers[1].attention.requires_grad_(False)
    return model


def train(make_model: Callable, wrap: Callable, uneven: str = "refuse", **options):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    slices = [shard_batch(batch, rank, world_size, uneven) for batch in BATCHES]
    return record_training(wrap(make_model()), slices, **options)


def reference(make_model: Callable, **options):
    torch.manual_seed(0)
    return record_training(make_model(), BATCHES, **options)


def each(work: Callable, cases: dict[str, Any], world_size: int) -> dict[str, list[Any]]:
    """`work(value)` of each case in one launch: {name: results in rank order}."""

    def run() -> dict[str, Any]:
        return {name: work(value) for name, value in cases.items()}

    ranks = launch(run, world_size=world_size)
    return {name: [rank[name] for rank in ranks] for name in cases}


@pytest.fixture(scope="module", params=[1, 2, 3, 5], ids="{} ranks".format)
def trained(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    """One process's record, and each rung's, all rungs of one world size in one launch."""
    make_model = tied_and_frozen if request.param == 3 else plain
    return reference(make_model), each(partial(train, make_model), RUNGS, request.param)


@pytest.mark.parametrize("rung", RUNGS)
def test_trains_like_one_process(trained: Any, rung: str) -> None:
    expected, records = trained
    assert_same_training(expected, records[rung])


def test_clipping_comes_after_averaging() -> None:
    cases = {name: RUNGS[name] for name in ("naive", "small")}
    for records in each(partial(train, plain, clip=0.1), cases, 3).values():
        assert_same_training(reference(plain, clip=0.1), records)


def weighted_step(model: nn.Module, batch) -> torch.Tensor:
    """A rank's mean loss, weighted by its share of the tokens; 0 where it has none."""
    tokens, targets = batch
    total = torch.tensor(float(targets.numel()))
    dist.all_reduce(total)
    loss = cross_entropy(model(tokens), targets, reduction="sum") / total
    (loss * dist.get_world_size()).backward()
    model.finish_gradients()
    return loss * total / max(targets.numel(), 1)


@pytest.mark.parametrize("world_size", [4, 7])
def test_an_uneven_batch_weighted_by_tokens_is_right(world_size: int) -> None:
    work = partial(train, plain, uneven="allow", step=weighted_step)
    for records in each(
        work, {name: RUNGS[name] for name in ("naive", "small")}, world_size
    ).values():
        assert_same_training(reference(plain), records)


def test_an_uneven_batch_without_weights_is_wrong_and_refused_by_default() -> None:
    with pytest.raises(NotEquivalent):
        records = launch(partial(train, uneven="allow"), plain, NaiveDDP, world_size=4)
        assert_same_training(reference(plain), records)
    with pytest.raises(Exception, match="30 rows does not divide over 4 ranks"):
        launch(train, plain, NaiveDDP, world_size=4)


def test_accumulation_is_the_large_batch() -> None:
    def work(case: tuple[Callable, int]) -> Any:
        wrap, parts = case
        return train(plain, wrap, step=partial(accumulate, num_microbatches=parts))

    wraps = (AccumulatingDDP, nn.parallel.DistributedDataParallel)
    cases = {f"{wrap.__name__}, {parts}": (wrap, parts) for wrap in wraps for parts in (1, 2, 5)}
    for records in each(work, cases, 3).values():
        assert_same_training(reference(plain), records)


def test_no_sync_sends_once_and_sending_each_time_costs_each_time() -> None:
    def calls(parts: int) -> int:
        model = AccumulatingDDP(plain(), bucket_bytes=20_000)
        with record_communication() as log:
            accumulate(model, shard_batch(BATCHES[0], dist.get_rank(), 2), parts)
        assert log.calls() == len(model.buckets)
        return log.calls()

    once, *others = each(calls, {"1 part": 1, "5 parts": 5}, 2).values()
    assert len(set(once)) == 1 and others == [once]


def test_gradients_stay_windows_into_their_bucket() -> None:
    def windows(set_to_none: bool) -> bool:
        model = SMALL(plain())
        for batch in BATCHES:
            model.zero_grad(set_to_none=set_to_none)
            tokens, targets = shard_batch(batch, dist.get_rank(), 2)
            cross_entropy(model(tokens), targets).backward()
            model.finish_gradients()
        return all(
            param.grad.untyped_storage().data_ptr() == bucket.buffer.untyped_storage().data_ptr()
            for bucket in model.buckets
            for param in bucket.views
        )

    found = each(windows, {"set to None": True, "zeroed": False}, 2)
    assert list(found.values()) == [[True, True]] * 2


class Skipping(nn.Module):
    """Uses its second layer on even ranks only, and its third nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, use_second: bool) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if use_second else x


def test_a_parameter_that_some_ranks_do_not_use_counts_as_zero() -> None:
    cases = {"naive": NaiveDDP, "bucketed": partial(BucketedDDP, bucket_bytes=40)}
    for results in each(grads_of_skipping, cases, 3).values():
        check_unused_parameters(results)


def grads_of_skipping(wrap: Callable) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    model, steps = wrap(Skipping().double()), []
    for _ in range(2):  # the second step must not send what the first left
        model.zero_grad()
        x = torch.ones(2, 4, dtype=torch.float64)
        model(x, dist.get_rank() % 2 == 0).sum().backward()
        model.finish_gradients()
        steps.append([p.grad.clone() for p in model.parameters()])
    return steps


def check_unused_parameters(results: list[list[list[torch.Tensor]]]) -> None:
    torch.manual_seed(0)
    x = Skipping().double().layers[0](torch.ones(2, 4, dtype=torch.float64)).detach()
    of_a_rank = torch.ones(4, 1, dtype=torch.float64) * x.sum(0)
    for steps in results:
        for found in steps:
            # Ranks 0 and 2 of three use the second layer, none the third.
            assert torch.allclose(found[2], of_a_rank * 2 / 3, rtol=1e-12)
            assert torch.equal(found[4], torch.zeros(4, 4, dtype=torch.float64))


def test_a_subgroup_averages_among_itself() -> None:
    def average(wrap: Callable) -> tuple[float, float]:
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        torch.manual_seed(dist.get_rank())
        model = wrap(nn.Linear(2, 1, bias=False).double(), group=groups[dist.get_rank() % 2])
        model(torch.full((1, 2), float(dist.get_rank()), dtype=torch.float64)).sum().backward()
        model.finish_gradients()
        return model.module.weight.grad[0, 0].item(), model.module.weight[0, 0].item()

    for name, results in each(average, RUNGS, 4).items():
        assert [grad for grad, _ in results] == [1.0, 2.0, 1.0, 2.0], name
        assert results[0] == results[2] and results[1] == results[3], name
        assert results[0] != results[1], name


def test_bfloat16_gradients_are_averaged_to_one_rounding() -> None:
    def grads(wrap: Callable) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = wrap(nn.Linear(8, 8, bias=False).bfloat16())
        torch.manual_seed(1 + dist.get_rank())
        model(torch.randn(4, 8).bfloat16()).sum().backward()
        local = model.module.weight.grad.float().clone()
        model.finish_gradients()
        return local, model.module.weight.grad

    # Backward leaves the bucketed gradient in flight: take the rank's own from the naive wrapper.
    found = each(grads, {name: RUNGS[name] for name in ("naive", "small")}, 3)
    for results in found.values():
        assert all(torch.equal(results[0][1], r[1]) for r in results)
        assert results[0][1].dtype == torch.bfloat16
    mean = torch.stack([local for local, _ in found["naive"]]).mean(0)
    # Two additions and a division, each rounded to 8 bits: 3 * 2^-9 of the largest term.
    largest = torch.stack([local.abs() for local, _ in found["naive"]]).amax()
    assert (found["naive"][0][1].float() - mean).abs().max() <= 3 * 2**-8 * largest


def test_mixed_dtypes_go_into_separate_buckets() -> None:
    params = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.bfloat16) * 2]
    buckets = [list(bucket.views) for bucket in make_buckets(params, 2**20)]
    found = [[id(param) for param in bucket] for bucket in buckets]
    assert sorted(found) == sorted([id(params[i]) for i in indices] for indices in ([3, 1], [2, 0]))
    assert make_buckets([], 2**20) == []


def test_a_model_of_mixed_dtypes_is_averaged() -> None:
    def grads(wrap: Callable) -> list[torch.Tensor]:
        torch.manual_seed(0)
        wide, narrow = nn.Linear(3, 4), nn.Linear(4, 2).bfloat16()
        model = wrap(nn.Sequential(wide, Cast(), narrow, nn.Linear(2, 1).bfloat16()))
        model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
        model.finish_gradients()
        return [p.grad.float() for p in model.parameters()]

    found = each(grads, RUNGS, 2)
    for ranks in found.values():
        for mine, other, expected in zip(*ranks, found["naive"][0], strict=True):
            assert torch.equal(mine, other) and torch.equal(mine, expected)


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_calls_and_bytes_are_as_predicted(world_size: int) -> None:
    def count(wrap: Callable) -> tuple[int, int, int]:
        model = wrap(Decoder(CONFIG))
        tokens, targets = shard_batch(BATCHES[0], dist.get_rank(), dist.get_world_size())
        with record_communication() as log:
            cross_entropy(model(tokens), targets).backward()
            model.finish_gradients()
        buckets = len(getattr(model, "buckets", []))
        return log.calls(), log.payload_bytes(), log.wire_bytes(), buckets

    model = Decoder(CONFIG)
    tensors, nbytes = len(list(model.parameters())), 4 * num_params(model)
    for results in each(count, RUNGS, world_size).values():
        for calls, payload, wire, buckets in results:
            assert calls == (buckets or tensors)
            assert payload == nbytes
            # Each call rounds up to whole bytes.
            assert 0 <= wire - wire_bytes("all_reduce", nbytes, world_size) <= calls


class Noted:
    """A handle whose wait is an event too."""

    def __init__(self, work: dist.Work, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._events.append("wait")
        self._work.wait()


def order(wrap: Callable) -> tuple[int, bool]:
    """Calls that leave before the last gradient is there; whether backward waited for any."""
    events: list[str] = []
    model = plain()
    for name, param in model.named_parameters():  # before the wrapper hangs its own hooks
        param.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    model, real = wrap(model), dist.all_reduce

    def noted(*args, **kwargs):
        events.append("send")
        work = real(*args, **kwargs)
        return work if work is None else Noted(work, events)

    with mock.patch.object(dist, "all_reduce", noted):
        tokens, targets = shard_batch(BATCHES[0], dist.get_rank(), 2)
        cross_entropy(model(tokens), targets).backward()
        events.append("end")
        model.finish_gradients()
    last = max(i for i, event in enumerate(events) if event not in ("send", "wait", "end"))
    return events[:last].count("send"), "wait" in events[: events.index("end")]


def test_overlap_by_the_order_of_events() -> None:
    """Not by the clock: several calls leave while gradients are missing, and none is waited for."""
    found = each(order, {name: RUNGS[name] for name in ("naive", "overlapped", "small")}, 2)
    assert found["naive"] == [(0, False)] * 2
    for sends, waited in found["overlapped"] + found["small"]:
        assert sends >= 3 and not waited


def test_buckets_of_mixed_dtypes_leave_in_the_order_in_which_backward_completes_them() -> None:
    """Else the first bucket, which waits for the first layer, would hold up all others."""
    pairs = [(torch.bfloat16, 40), (torch.float32, 3)] * 6
    params = [nn.Parameter(torch.ones(size, dtype=dtype)) for dtype, size in pairs]
    position = {param: i for i, param in enumerate(params)}
    buckets = make_buckets(params, 200)
    assert len(buckets) == 4
    complete = [min(position[param] for param in bucket.views) for bucket in buckets]
    assert complete == sorted(complete, reverse=True)


@pytest.mark.parametrize("limit", [100, 2_000, 10_000, 2**20])
def test_buckets_are_as_full_as_the_limit_allows(limit: int) -> None:
    params = list(Decoder(CONFIG).parameters())
    buckets = [list(bucket.views) for bucket in make_buckets(params, limit)]
    order = [id(param) for bucket in buckets for param in bucket]
    assert order == [id(param) for param in reversed(params)]
    sizes = [[4 * param.numel() for param in bucket] for bucket in buckets]
    assert all(sum(bucket) <= limit or len(bucket) == 1 for bucket in sizes)
    assert all(sum(a) + b[0] > limit for a, b in itertools.pairwise(sizes))


def test_buffers_start_equal() -> None:
    def mean(wrap: Callable) -> list[float]:
        norm = nn.BatchNorm1d(3)
        norm.running_mean.fill_(dist.get_rank() + 5)
        return wrap(norm).module.running_mean.tolist()

    assert list(each(mean, RUNGS, 3).values()) == [[[5.0] * 3] * 3] * len(RUNGS)


@pytest.mark.parametrize("wrap", [OverlappedDDP, SMALL], ids=["overlapped", "bucketed"])
def test_a_second_backward_is_refused(wrap: Callable) -> None:
    def twice() -> None:
        model = wrap(nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        model.finish_gradients()

    with pytest.raises(LaunchError, match=r"second backward|4 gradients were sent, expected 2"):
        launch(twice, world_size=2)


def test_a_second_backward_is_refused_when_a_parameter_is_unused() -> None:
    """The bucket never left, as one of its parameters is missing."""

    def twice() -> None:
        model = BucketedDDP(Skipping())
        for _ in range(2):
            model(torch.ones(1, 4), dist.get_rank() == 0).sum().backward()
        model.finish_gradients()

    with pytest.raises(LaunchError, match="second backward"):
        launch(twice, world_size=2)


def test_overlapped_refuses_an_unused_parameter() -> None:
    def skip() -> None:
        model = OverlappedDDP(Skipping())
        model(torch.ones(1, 4), True).sum().backward()
        model.finish_gradients()

    with pytest.raises(LaunchError, match="4 gradients were sent, expected 6"):
        launch(skip, world_size=2)


def test_an_exception_inside_no_sync_does_not_stop_syncing() -> None:
    def syncing() -> bool:
        model = AccumulatingDDP(nn.Linear(2, 1))
        try:
            with model.no_sync():
                raise KeyError
        except KeyError:
            return model.syncing

    assert launch(syncing, world_size=1) == [True]


def test_no_sync_inside_no_sync_stays_silent() -> None:
    def syncing() -> tuple[bool, bool]:
        model = AccumulatingDDP(nn.Linear(2, 1))
        with model.no_sync():
            with model.no_sync():
                pass
            inside = model.syncing
        return inside, model.syncing

    assert launch(syncing, world_size=1) == [(False, True)]


def test_accumulation_keeps_one_copy_of_the_gradients_and_the_wrapper_can_be_returned() -> None:
    def work() -> tuple[bool, nn.Module]:
        model = AccumulatingDDP(plain(), bucket_bytes=20_000)
        tokens, targets = shard_batch(BATCHES[0], dist.get_rank(), 2)
        with model.no_sync():
            cross_entropy(model(tokens), targets).backward()
        inside = all(
            param.grad.data_ptr() == view.data_ptr()
            for bucket in model.buckets
            for param, view in bucket.views.items()
        )
        cross_entropy(model(tokens), targets).backward()
        model.finish_gradients()
        return inside, model

    results = launch(work, world_size=2)
    assert [inside for inside, _ in results] == [True, True]
    assert all(isinstance(model, AccumulatingDDP) for _, model in results)


def test_float16_gradients_do_not_overflow_in_the_sum() -> None:
    def grad(wrap: Callable) -> float:
        model = wrap(nn.Linear(1, 1, bias=False).half())
        model(torch.full((1, 1), 40_000.0).half()).sum().backward()
        model.finish_gradients()
        return model.module.weight.grad.item()

    assert list(each(grad, RUNGS, 2).values()) == [[40_000.0, 40_000.0]] * len(RUNGS)


def test_train_steps_do_not_depend_on_the_number_of_ranks() -> None:
    language = GeneratedLanguage()
    (one,) = launch(train_steps, language, 6, world_size=1)
    for losses in launch(train_steps, language, 6, world_size=4):
        assert losses == pytest.approx(one, rel=1e-4)


def test_train_steps_are_those_of_one_process() -> None:
    """Against a loop that knows nothing of ranks: cleared gradients, AdamW, mean loss."""
    language = GeneratedLanguage()
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    expected = []
    for step in range(6):
        tokens, targets = language.batch(step, 16, 64)
        loss = cross_entropy(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in launch(train_steps, language, 6, world_size=2):
        assert losses == pytest.approx(expected, rel=1e-4)


def test_train_steps_take_any_number_of_ranks() -> None:
    """A batch of 16 sequences on 3 and on 5 ranks: rounded up to as many for each."""
    for world_size in (3, 5):
        for losses in launch(train_steps, GeneratedLanguage(), 2, world_size=world_size):
            assert len(losses) == 2 and losses[0] == pytest.approx(math.log(256), abs=0.2)


BUGS = {
    "summed": ("bucket.buffer /= dist.get_world_size(self.group)", "pass"),
    "averaged twice": ("bucket.work.wait()", "bucket.work.wait(); bucket.buffer /= 2"),
    "stale": ("view.copy_(param.grad)", "pass"),
    "not counted anew": ("bucket.ready, bucket.work = set(), None", "bucket.work = None"),
    "no broadcast": ("broadcast_from_rank_0(module, group)", "pass"),
    "unused not sent": ("in self.buckets[self.num_sent :]:\n            for param", "in []:\n"
                        "            for param"),
    "unused not zeroed": ("view.zero_()", "view.fill_(1)"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    source = export_script("06").split("if __name__")[0]
    old, new = BUGS[bug]
    assert old in source
    names: dict = {"__name__": "__main__"}
    exec(compile(source.replace(old, new), "<broken>", "exec"), names)
    wrap = names["BucketedDDP"]
    with pytest.raises((NotEquivalent, LaunchError, AssertionError)):
        small, tiny = (partial(wrap, bucket_bytes=size) for size in (20_000, 40))

        def run() -> Any:
            return train(plain, small), grads_of_skipping(tiny)

        results = launch(run, world_size=3, timeout_s=20)
        assert_same_training(reference(plain), [record for record, _ in results])
        check_unused_parameters([grads for _, grads in results])


def test_the_exported_script_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(export_script("06").replace("num_steps=200", "num_steps=12"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nats a byte") == 1 and "loss 5." in done.stdout, "rank 0 alone prints"
