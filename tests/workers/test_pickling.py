"""What travels between notebook and workers, here and back within one process."""

from __future__ import annotations

import linecache
import subprocess
import sys
import traceback

import numpy
import pytest
import torch

from playbook_utils.workers.pickling import VIEWS_FROM_BYTES, add_sources, dumps, loads


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_travels_in_pytorchs_own_way() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    assert [part.tolist() for part in loads(dumps(nested).data).unbind()] == [[1, 1], [0, 0, 0]]


def test_a_received_tensor_can_be_changed_and_resized() -> None:
    found = back(torch.ones(2))
    found.add_(1).resize_(5)
    assert found.shape == (5,)


def received(obj, total_bytes: int = VIEWS_FROM_BYTES):
    """What arrives of `obj` when its buffers lie in a block of `total_bytes`."""
    payload = dumps(obj, out_of_band=True)
    block = memoryview(bytearray(total_bytes + sum(len(b) for b in payload.buffers)))
    buffers, start = [], 0
    for buffer in payload.buffers:
        buffers.append(block[start : start + len(buffer)])
        buffers[-1][:] = buffer
        start += len(buffer)
    return loads(payload.data, buffers), block


def test_large_tensors_and_arrays_are_neither_copied_into_the_pickle_nor_out_of_it() -> None:
    tensor, array = torch.arange(5000.0), numpy.arange(5000.0)
    payload = dumps([tensor, array], out_of_band=True)
    assert len(payload.data) < 1000
    addresses = [torch.frombuffer(b, dtype=torch.uint8).data_ptr() for b in payload.buffers]
    assert addresses == [tensor.data_ptr(), array.ctypes.data]
    (found_tensor, found_array), block = received([tensor, array])
    block[:4] = bytes(4)[:3] + b"\x40"  # 2.0 in place of the first 0.0
    assert torch.equal(found_tensor[:3], torch.tensor([2.0, 1.0, 2.0]))
    found_array[0] = 7.0
    assert bytes(block[20000:20008]) == numpy.float64(7).tobytes()


@pytest.mark.parametrize("total_bytes", [0, VIEWS_FROM_BYTES])
def test_large_tensors_of_every_kind(total_bytes: int) -> None:
    weight = torch.nn.Parameter(torch.rand(64, 64))
    weight.grad = torch.rand(64, 64)
    weight.sequence_parallel = True
    base = torch.arange(10000).reshape(100, 100)
    sent = [
        weight, weight, base.T, base[::2], base.to(torch.bfloat16), base % 2 == 0,
        torch.rand(3, 0, 5000), torch.tensor(1.5), torch.rand(3000, dtype=torch.complex64).conj(),
        torch.rand(3000, requires_grad=True),
    ]  # fmt: skip
    found, _ = received(sent, total_bytes)
    for a, b in zip(found, sent, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b) and a.requires_grad == b.requires_grad
        assert a.is_contiguous() and a.is_leaf and not a._is_view()
    assert found[0] is found[1] and isinstance(found[0], torch.nn.Parameter)
    assert torch.equal(found[0].grad, weight.grad) and found[0].sequence_parallel
    with torch.no_grad():
        found[0].add_(1)
    assert not torch.equal(found[0], weight)


def test_large_tensors_of_a_small_payload_can_be_resized() -> None:
    (found, _) = received(torch.ones(5000), total_bytes=0)
    found.untyped_storage().resize_(0)


def test_small_tensors_are_part_of_the_pickle() -> None:
    assert dumps([torch.ones(10)] * 3, out_of_band=True).buffers == []


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
