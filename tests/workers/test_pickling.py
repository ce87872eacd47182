"""What travels between notebook and workers, here and back within one process."""

from __future__ import annotations

import linecache
import subprocess
import sys
import traceback

import pytest
import torch

from playbook_utils.workers.pickling import add_sources, dumps, loads


def back(obj):
    return loads(dumps(obj).data)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.int64, torch.uint8, torch.bool, torch.complex64,
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 5)])
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 7).to(dtype)
    found = back(tensor)
    assert found.dtype == dtype and found.shape == tensor.shape
    assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_views_arrive_as_what_they_show() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for view in (base.T, base[:, ::2], base[1:2].expand(3, 4), base[0, 1]):
        assert torch.equal(back(view), view)
    conj = torch.tensor([1 + 2j]).conj()
    assert torch.equal(back(conj), conj)


def test_only_the_view_travels_not_the_whole_storage() -> None:
    assert len(dumps(torch.zeros(1_000_000)[:10]).data) < 1000


def test_gradients_leaves_and_results_of_computation() -> None:
    leaf = torch.ones(3, requires_grad=True)
    (leaf * 2).sum().backward()
    found = back(leaf)
    assert found.requires_grad and torch.equal(found.grad, torch.full((3,), 2.0))
    result = back(leaf * 2)
    assert not result.requires_grad and torch.equal(result, torch.full((3,), 2.0))


def test_attributes_of_a_parameter_travel() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.sequence_parallel = True
    found = back({"p": parameter})["p"]
    assert found.sequence_parallel is True and isinstance(found, torch.nn.Parameter)


def test_one_tensor_under_two_names_stays_one() -> None:
    tensor = torch.ones(2)
    first, second = back([tensor, tensor])
    assert first is second


def test_a_received_tensor_can_be_changed_and_resized() -> None:
    found = back(torch.ones(2))
    found.add_(1).resize_(5)
    assert found.shape == (5,)


def test_a_known_class_is_left_as_it_is() -> None:
    class Counter:
        made = 0

    data = dumps(Counter()).data
    Counter.made = 7
    found = loads(data)
    assert type(found) is Counter and Counter.made == 7


def test_a_new_class_arrives_whole() -> None:
    """In a process that does not have it, its attributes must be set."""
    code = (
        "import sys; sys.modules['__main__'].__dict__['a'] = 1\n"
        "class Made:\n    kept = 5\n    def twice(self): return 2 * self.kept\n"
        "from playbook_utils.workers.pickling import dumps\n"
        "sys.stdout.buffer.write(bytes(dumps(Made()).data))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    found = loads(done.stdout)
    assert found.twice() == 10


def test_the_file_name_and_the_source_of_a_cell_travel() -> None:
    name, text = "<cell 5>", "def broken():\n    inner = lambda: 1 / 0  # here\n    inner()\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)
    payload = dumps(names["broken"])
    assert payload.sources == {name: text}
    del linecache.cache[name]
    add_sources(payload.sources)
    try:
        loads(payload.data)()
    except ZeroDivisionError as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
    assert [(f.filename, f.line) for f in frames] == [
        (name, "inner()"),
        (name, "inner = lambda: 1 / 0  # here"),
    ]
