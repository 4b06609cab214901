"""What a call does on its way to the GPU, shown without one: it waits for nothing and compiles nothing anew."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")
import triton

from ppo_ops.kernels import cuda
from ppo_ops.kernels import triton as kernels
from ppo_ops.ops import logits_grad, vocab_stats
from ppo_ops.ops.merge_stats import merge_stats

JITTED = ("vocab_stats_kernel", "merge_splits_kernel", "logits_grad_kernel", "entries_kernel")


def _copied(make: Any) -> Any:
    """Raises for tensors of the device that are made of numbers on the host: such a copy waits for the device.

    On "meta" no operator shows it, hence a stand-in for the function.
    """

    def made(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = make(*args, **kwargs)
        if result.device.type != "cpu":
            raise AssertionError(f"{make} waits for the device")
        return result

    return made


class NoWait(TorchDispatchMode):
    """Raises for operators that read a tensor's value on the host, or that copy between host and device."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "item", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        makers = {name: _copied(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")}
        self.makers = mock.patch.multiple(torch, **makers)

    def __enter__(self) -> NoWait:
        self.makers.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.makers.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in self.READS or len({tensor.device for tensor in tensors}) > 1:
            raise AssertionError(f"{func} waits for the device")
        if name.startswith("index") and any(t.dtype == torch.bool for t in tree_leaves(args[1]) if t is not None):
            raise AssertionError(f"{func} with a boolean index waits for the device")
        return result


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Notes the grids in place of launching."""
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: grids.append(grid)

    for name in JITTED:
        monkeypatch.setattr(kernels, name, Recorder())
    return grids


def _arguments(option: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 5)) -> dict[str, Any]:
    """Of the stages, on the device "meta", which has shapes and no values."""
    empty = functools.partial(torch.empty, device="meta")
    rows = torch.Size(shape).numel()
    arguments = dict.fromkeys(("keep_mask", "temperature", "keep_ids", "keep_offsets"))
    arguments |= {"logits": empty(*shape, 40_000, dtype=dtype), "target": empty(shape, dtype=torch.int64)}
    if option in ("mask", "everything"):
        arguments["keep_mask"] = empty(*shape, 40_000, dtype=torch.bool)
    if option in ("temperature", "everything", "ids"):
        arguments["temperature"] = empty(shape)
    if option == "ids":
        arguments["keep_ids"] = empty(99, dtype=torch.int32)
        arguments["keep_offsets"] = empty(rows + 1, dtype=torch.int64)
    return arguments


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("shape", [(), (15,), (3, 5)], ids=str)
@pytest.mark.parametrize("option", ["plain", "mask", "temperature", "ids", "everything"])
def test_no_operator_waits(
    option: str, shape: tuple[int, ...], with_entropy: bool, no_launch: list[tuple[int, ...]]
) -> None:
    """Both stages as CUDA runs them, and the merge between."""
    given = _arguments(option, shape=shape)
    rows = [given[name] for name in ("logits", "target", "keep_mask", "temperature")]
    sets = (given["keep_ids"], given["keep_offsets"])
    where = (-100, 39_999, None, "")
    with NoWait() as mode:
        stats = vocab_stats._cuda(*rows, *where, 1, with_entropy, *sets)
        outputs = merge_stats(stats, given["target"], given["temperature"], -100, 1, "")
        upstream = [torch.empty_like(given["target"], dtype=torch.float32) for _ in range(2)]
        grad = given["logits"].new_empty(given["logits"].shape)
        numbers = (outputs[2], upstream[0], upstream[1] if with_entropy else None)
        logits_grad._write(cuda, grad, *rows, *numbers, *where, *sets)
    assert mode.seen > 5
    # Statistics of two splits, their merge, those of the kept ids, the gradient.
    assert len(no_launch) == 3 + (option == "ids")
    assert all(len(grid) == 1 for grid in no_launch)  # y and z end at 65,535


@pytest.mark.parametrize(
    "waits",
    [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor([1, 2, 3], device=x.device)],
    ids=["item", "boolean index", "a list of numbers"],
)
def test_the_mode_notices(waits: Any) -> None:
    with NoWait(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        waits(torch.empty(3, device="meta"))


def test_no_rows_launch_nothing(no_launch: list[tuple[int, ...]]) -> None:
    for shape, width in (((0,), 7), ((2, 0), 7), ((3,), 0)):
        logits = torch.empty(*shape, width, device="meta")
        target = torch.empty(shape, dtype=torch.int64, device="meta")
        stats = vocab_stats._cuda(logits, target, None, None, -100, None, None, "", 1, True)
        numbers = (stats, target.float(), target.float())
        logits_grad._write(cuda, torch.empty_like(logits), logits, target, None, None, *numbers, -100, None, None, "")
    # Only the shard without columns has rows: their statistics are those of an empty set.
    assert no_launch == [(3,)]


class _Driver:
    """What Triton asks a driver before it compiles: an H200, which is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Calls of the launchers go through Triton's own path up to the launch; gives the number of compiled kernels."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver())

    class WarmUp:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return functools.partial(self.kernel.run, grid=grid, warmup=True)

    jitted = [getattr(kernels, name) for name in JITTED]
    for name, kernel in zip(JITTED, jitted, strict=True):
        monkeypatch.setattr(kernels, name, WarmUp(kernel))
    yield lambda: [len(kernel.device_caches[0][0]) for kernel in jitted]
    for kernel in jitted:
        kernel.device_caches.clear()
    triton.runtime.driver._active = before


def _call(rows: int, columns: int, **more: Any) -> None:
    given = SimpleNamespace(pad=0, offset=0, target=torch.int64, ignore_index=-100, vocab_start=0, stride=1)
    vars(given).update(more)
    width = columns + given.pad
    logits = torch.zeros(rows * width + given.offset)[given.offset :].view(rows, width)[:, :columns]
    target = torch.zeros(given.stride * rows, dtype=given.target)[:: given.stride]
    per_row = torch.zeros(4, given.stride * rows)[:, :rows]
    where = {"ignore_index": given.ignore_index, "vocab_start": given.vocab_start, "columns": columns}
    kernels.vocab_stats(logits, target, None, per_row[0], per_row, **where)
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    kernels.logits_grad(logits, target, None, per_row[0], per_row, per_row[0], per_row[1], gradient, **where)


def test_sizes_strides_and_numbers_compile_nothing_anew(compiles: Any) -> None:
    """Neither a 1 nor a multiple of 16 nor another address: Triton by itself would make variants of all of them."""
    _call(4, 40_000)
    assert compiles() == [1, 1, 1, 0]
    for rows, columns in ((1, 40_000), (5, 65_536), (16, 70_000), (3, 33_336)):
        _call(rows, columns)
    for more in (
        {"pad": 4},
        {"offset": 4},
        {"stride": 2},
        {"vocab_start": 1},
        {"vocab_start": 16},
        {"ignore_index": 0},
    ):
        _call(4, 40_000, **more)
    assert compiles() == [1, 1, 1, 0]
    # One variant more for rows off 16 bytes, one for rows that one program reads; each target dtype has its own.
    _call(4, 40_001)
    assert compiles() == [2, 1, 2, 0]
    _call(4, 1000)
    assert compiles() == [3, 1, 2, 0]
    _call(4, 992)
    _call(2, 16)
    assert compiles() == [3, 1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_every_integer_dtype_compiles(compiles: Any, dtype: torch.dtype) -> None:
    _call(2, 1000, target=dtype)
    assert compiles() == [1, 0, 1, 0]
