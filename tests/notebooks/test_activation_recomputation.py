"""The techniques of lesson 02, imported from its cells, against plain autograd, bit for bit.

The lesson shows GPT blocks with one input; here they meet several inputs and results, integers,
frozen inputs, autocast, nesting, Llama's blocks with rotary positions, and uneven segments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.activation_recomputation import (
    NaiveCheckpoint,
    Surroundings,
    best_num_segments,
    checkpoint,
    checkpoint_by_hooks,
    held,
    hfu_from_mfu,
    recompute_attention,
    recompute_layers,
    same_bits,
    unfused_gpt,
)
from playbook_utils.checks import record_training
from playbook_utils.commands.export import export_script
from playbook_utils.data import GeneratedLanguage
from playbook_utils.measure import saved_for_backward, step_cost
from playbook_utils.model import Decoder, DecoderConfig
from playbook_utils.predict import flops
from playbook_utils.predict.activations import layer_terms
from playbook_utils.predict.presets import preset

BOTH = pytest.mark.parametrize("run", [checkpoint, checkpoint_by_hooks], ids=["function", "hooks"])
GPT = DecoderConfig.gpt_tiny(
    vocab_size=33, dim=24, num_heads=4, num_layers=3, max_seq_len=9, dropout=0.2
)
LLAMA = DecoderConfig.tiny(vocab_size=33, dim=24, num_layers=3, ff_dim=40)
BATCHES = [GeneratedLanguage(vocab_size=33).batch(step, 3, 9) for step in range(3)]


def same_training(make: Callable[[], nn.Module], how: Callable[[nn.Module], Any]) -> bool:
    """Losses, gradients and parameters of three steps, and the generator after them."""
    found = []
    for change in (lambda model: None, how):
        torch.manual_seed(0)
        model = make()
        change(model)
        torch.manual_seed(1)
        record = record_training(model, BATCHES)
        values = [
            tensor for step in record.steps for tensor in (*step.grads.values(),
                                                           *step.params.values())
        ]  # fmt: skip
        found.append(([step.loss for step in record.steps], values, torch.get_rng_state()))
    one, other = found
    pairs = zip([*one[1], one[2]], [*other[1], other[2]], strict=True)
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in pairs)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layers_per_segment", [1, 2, 3])
def test_gpt_with_dropout_trains_with_the_same_bits(
    run: Callable, dtype: torch.dtype, layers_per_segment: int
) -> None:
    how = partial(recompute_layers, checkpoint=run, layers_per_segment=layers_per_segment)
    assert same_training(lambda: unfused_gpt(GPT).to(dtype), how)


@BOTH
def test_llama_and_the_attention_core_train_with_the_same_bits(run: Callable) -> None:
    assert same_training(lambda: Decoder(LLAMA), partial(recompute_layers, checkpoint=run))
    assert same_training(lambda: unfused_gpt(GPT), partial(recompute_attention, checkpoint=run))


@BOTH
def test_a_checkpoint_inside_a_checkpoint(run: Callable) -> None:
    def how(model: nn.Module) -> None:
        recompute_attention(model, run)
        recompute_layers(model, run, 2)

    assert same_training(lambda: unfused_gpt(GPT), how)


def test_naive_is_right_without_dropout_and_wrong_with_it() -> None:
    how = partial(recompute_layers, checkpoint=NaiveCheckpoint.apply)
    dry = DecoderConfig.gpt_tiny(vocab_size=33, dim=24, num_layers=2, max_seq_len=9)
    assert same_training(lambda: unfused_gpt(dry), how)
    assert not same_training(lambda: unfused_gpt(GPT), how)


class Several:
    """Two results and one without a gradient, from three tensors and two that are none."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 7))
        self.calls = 0

    def __call__(
        self, a: Tensor, index: Tensor, name: str, b: Tensor, no: None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert name == "name" and no is None
        self.calls += 1
        hidden = torch.dropout((a @ self.weight).tanh(), 0.3, True) * b
        return hidden.exp(), hidden[index].sin(), index + 1


@BOTH
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_several_inputs_and_results(run: Callable, needs: tuple[bool, bool]) -> None:
    def grads(run: Callable) -> list[Tensor | None]:
        fn = Several()
        a, b = (torch.linspace(0, 1, 5 * n).view(5, n).requires_grad_(need)
                for n, need in zip((5, 7), needs, strict=True))  # fmt: skip
        torch.manual_seed(3)
        first, second, count = run(fn, a, torch.tensor([0, 3, 3]), "name", b, None)
        assert count.tolist() == [1, 4, 4]
        (first.sum() + 2 * second.sum() + torch.rand(())).backward()
        return [a.grad, b.grad, fn.weight.grad, torch.rand(2)]

    for one, other in zip(grads(lambda fn, *args: fn(*args)), grads(run), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@BOTH
def test_only_one_of_two_results_is_used(run: Callable) -> None:
    fn, a, b = Several(), torch.ones(5, 5, requires_grad=True), torch.ones(5, 7)
    run(fn, a, torch.tensor([0]), "name", b, None)[1].sum().backward()
    assert fn.calls == 2
    assert a.grad[0].abs().sum() > 0 and a.grad[1:].abs().sum() == 0


@BOTH
def test_one_forward_and_one_more(run: Callable) -> None:
    fn, a, b = Several(), torch.ones(5, 5, requires_grad=True), torch.ones(5, 7)
    with torch.no_grad():
        assert not run(fn, a, torch.tensor([0]), "name", b, None)[0].requires_grad
    assert fn.calls == 1
    out, *_ = run(fn, a, torch.tensor([0]), "name", b, None)
    assert fn.calls == 2
    out.sum().backward()
    assert fn.calls == 3


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_there_again(run: Callable, dtype: torch.dtype) -> None:
    def grads(run: Callable) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        x = torch.linspace(0, 1, 20).view(4, 5).requires_grad_()
        with torch.autocast("cpu", dtype):
            out = run(module, x)
        assert out.dtype == dtype
        out.sum().backward()  # outside of it, as is usual
        return [x.grad, *(p.grad for p in module.parameters())]

    plain = grads(lambda fn, *args: fn(*args))
    assert all(torch.equal(a, b) for a, b in zip(plain, grads(run), strict=True))


def test_inputs_without_gradients_lose_parameters_gradients_only_in_the_function() -> None:
    x = torch.ones(2, 3)
    linear = nn.Linear(3, 3)
    assert not checkpoint(linear, x).requires_grad  # the trap that the lesson shows
    checkpoint_by_hooks(linear, x).sum().backward()
    assert linear.weight.grad is not None


def test_hooks_go_backward_twice_and_give_gradients_of_inputs_alone() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5))
    x = torch.ones(2, 3, requires_grad=True)
    out = checkpoint_by_hooks(module, x).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    assert torch.equal(first, second)
    assert module[0].weight.grad is None


def test_a_function_refuses_to_be_differentiated_twice() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(checkpoint(torch.sin, x).sum(), x, create_graph=True)


def test_hooks_can_be_differentiated_twice() -> None:
    x = torch.linspace(0, 1, 6, requires_grad=True)
    (first,) = torch.autograd.grad(checkpoint_by_hooks(torch.sin, x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, -x.detach().sin())


@pytest.mark.parametrize("make", [lambda y: [y], lambda y: {"y": y}, lambda y: (y, [y])])
def test_results_in_a_list_or_dict_are_refused(make: Callable) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match="expected a Tensor or a tuple"):
        checkpoint(lambda x: make(x.sin()), x)


@BOTH
def test_an_input_changed_in_place_is_refused(run: Callable) -> None:
    x = torch.ones(2, 3, requires_grad=True) * 1
    out = run(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match=r"in place|inplace"):
        out.sum().backward()


def test_the_attention_core_needs_an_unfused_attention_and_any_order_will_do() -> None:
    with pytest.raises(TypeError, match="expected UnfusedAttention"):
        recompute_attention(Decoder(GPT), checkpoint)
    model = unfused_gpt(GPT)
    recompute_attention(recompute_layers(model, checkpoint, 2), checkpoint)
    cores = [m.checkpoint for m in model.modules() if hasattr(m, "core")]
    assert cores == [checkpoint] * 3


def test_hooks_let_go_of_what_was_asked_for() -> None:
    results: list[StorageWeakRef] = []
    gone: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        middle = x.sin()  # keeps its input, exp its result
        middle.register_hook(lambda grad: gone.append(results[1].expired()))  # behind exp
        y = middle.exp()
        results.append(StorageWeakRef(y.untyped_storage()))
        return y

    x = torch.ones(5, requires_grad=True)
    checkpoint_by_hooks(fn, x).sum().backward()
    assert len(results) == 2 and gone == [True]


class OnGpuThree(Tensor):
    """Says that it is on GPU 3."""

    is_cuda = True

    def get_device(self) -> int:
        return 3


def test_the_generator_of_a_gpu_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {0: "zero", 3: "at forward"}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: states[gpu])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: states.update({gpu: state}))
    surroundings = Surroundings([torch.ones(2).as_subclass(OnGpuThree), torch.ones(2), None])
    states.update({0: "other", 3: "at backward"})
    with surroundings.restored():
        assert states == {0: "other", 3: "at forward"}
        states[3] = "drawn again"
    assert states == {0: "other", 3: "at backward"}


@BOTH
def test_the_input_alone_is_kept(run: Callable) -> None:
    module = nn.Sequential(nn.Linear(5, 80), nn.GELU(), nn.Linear(80, 5))
    x = torch.ones(3, 5, requires_grad=True)
    with saved_for_backward(module) as saved:
        run(module, x)
    # hooks of a checkpoint come before the recorder's: it sees the inputs of the function alone
    assert saved.total_bytes in (0, 3 * 5 * 4)

    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return run(self.inner, x)

    cost = step_cost(Run(), x)
    assert cost.kept_bytes == 3 * 5 * 4
    assert cost.backward_flops == 3 * cost.forward_flops


def test_unfused_attention_is_attention_and_its_layers_keep_what_the_formula_says() -> None:
    config = DecoderConfig.gpt_tiny(vocab_size=33, dim=24, num_heads=4, max_seq_len=18)
    torch.manual_seed(0)
    mine = unfused_gpt(config).double()
    theirs = Decoder(config).double()
    theirs.load_state_dict(mine.state_dict())
    tokens = BATCHES[0][0]
    torch.testing.assert_close(mine(tokens), theirs(tokens), rtol=1e-12, atol=1e-12)
    noisy = unfused_gpt(DecoderConfig.gpt_tiny(dim=24, num_heads=4, max_seq_len=18, dropout=0.1))
    layer, x = noisy.bfloat16().layers[0], torch.randn(2, 18, 24).bfloat16().requires_grad_()
    statistics = 2 * 2 * 2 * 18 * 2  # two norms, mean and 1 / std of each token, bfloat16
    assert step_cost(layer, x).kept_bytes == x.numel() * (34 + 5 * 4 * 18 // 24) + statistics


@pytest.mark.parametrize(
    ("name", "layers"),
    [("gpt-3-175b", 1), ("llama-3-8b", 1), ("llama-3-70b", 2), ("llama-3.1-405b", 3)],
)
def test_what_is_taken_home_of_segments_holds_for_models_of_today(name: str, layers: int) -> None:
    shape = preset(name)
    each = sum(term.num_bytes for term in layer_terms(shape, 2048)) / (2048 * shape.dim)
    k = best_num_segments(shape.num_layers, 2, each)
    assert -(-shape.num_layers // k) == layers
    assert round((2 * shape.num_layers / each) ** 0.5) == layers  # the lesson's last lines


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["gpt-3-175b", "llama-3-8b"])
def test_hfu_is_that_of_the_planner(name: str, recompute: str) -> None:
    shape = preset(name)
    forward = flops.forward_flops(shape, 2048)
    done = flops.training_flops(shape, 2048, recompute=recompute)
    expected = 0.4 * done / flops.model_flops(shape, 2048)
    assert hfu_from_mfu(0.4, forward, recompute) == pytest.approx(expected)


def test_a_single_bit_that_differs_is_seen() -> None:
    def record() -> Any:
        torch.manual_seed(0)
        return record_training(Decoder(LLAMA), BATCHES)

    one, other = record(), record()
    total = same_bits(one, other).split()[0]
    assert same_bits(one, other) == f"{total} of {total} are equal"
    changed = next(iter(other.steps[1].grads.values()))
    changed.view(torch.int32).view(-1)[0] ^= 1
    assert same_bits(one, other) == f"{int(total) - 1} of {total} are equal"


def test_what_is_held_peaks_where_the_cost_says() -> None:
    x = torch.ones(1, 9, 24, requires_grad=True)
    stack = nn.Sequential(*unfused_gpt(GPT).layers)
    samples, num_forward = held(stack, x)
    assert 0 < num_forward < len(samples)
    assert max(samples) == step_cost(stack, x).peak_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BOTH
def test_on_a_gpu_with_dropout(run: Callable) -> None:
    batches = [tuple(t.cuda() for t in batch) for batch in BATCHES]

    def grads(how: Callable) -> list[Tensor]:
        torch.manual_seed(0)
        model = unfused_gpt(GPT).cuda()
        how(model)
        return [g for s in record_training(model, batches).steps for g in s.grads.values()]

    plain = grads(lambda model: None)
    found = grads(partial(recompute_layers, checkpoint=run))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


BUGS = {
    "random state not set": ("torch.set_rng_state(self.cpu_state)", "pass"),
    "random state not put back": ("torch.random.fork_rng(self.gpus)", "ExitStack()"),
    "autocast in bfloat16 always": ("(kind, torch.get_autocast_dtype(kind),",
                                    "(kind, torch.bfloat16,"),
    "autocast forgotten": ("stack.enter_context(torch.autocast(*how))", "pass"),
    "not cut off": ("value.detach().requires_grad_(value.requires_grad)", "value"),
    "no gradients passed back": ("a.grad if isinstance(a, Tensor) else None for a in args",
                                 "None for a in args"),
    "surroundings of backward": ("with ctx.surroundings.restored(), torch.enable_grad():",
                                 "with torch.enable_grad():"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    source = export_script("02").split("if __name__")[0]
    old, new = BUGS[bug]
    assert old in source
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source.replace(old, new), "<broken>", "exec"), names)
    run = names["checkpoint"]

    def how(model: nn.Module) -> None:
        recompute_layers(model, run, 2)

    with pytest.raises((AssertionError, RuntimeError, UserWarning)):
        assert same_training(lambda: unfused_gpt(GPT), how)
        test_autocast_is_there_again(run, torch.float16)
