"""What only a device's runtime shows: CUDA graphs, synchronisation, streams, kernels' caches, Inductor, NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ppo_ops
from ppo_ops.ops.merge_stats import all_gather_stats
from tests.gpu.devices import OPTIONS, Call, gpu, make_call, portable
from tests.tolerances import assert_exact, assert_same_bits


def _assert_same(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert_same_bits(a, b)


def _captured(function: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """The function as a graph, after the warm-up on another stream that torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@gpu
@pytest.mark.parametrize("option", OPTIONS)
def test_graph_replays_with_new_data(device: str, option: str) -> None:
    call = make_call(device, option)
    graph, results = _captured(call.forward_backward)
    seen = []
    for seed in (1, 2):
        call.fill(seed)
        graph.replay()
        replayed = tuple(result.clone() for result in results)
        _assert_same(replayed, call.forward_backward())
        seen.append(replayed[0])
    assert not torch.equal(*seen)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_nothing_waits_for_the_device(device: str, option: str, dtype: torch.dtype) -> None:
    """Forward and backward, the first call included."""
    call = make_call(device, option, dtype=dtype)
    leaf = call.logits.detach().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = call.outputs(leaf * 1)
        torch.autograd.grad(outputs, leaf, [torch.ones_like(out) for out in outputs])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_the_debug_mode_would_have_told(device: str) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones((), device=device).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("option", ["plain", "mask", "ids"])
def test_the_current_stream_is_used(device: str, option: str) -> None:
    """The logits arrive late on a stream of their own: kernels on any other one would read what was there before."""
    call = make_call(device, option, rows=64)
    expected = call.forward_backward()
    right = call.logits.clone()
    call.logits.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        call.logits.copy_(right)
        results = call.forward_backward()
    side.synchronize()
    _assert_same(results, expected)


@portable
@pytest.mark.parametrize("option", [o for o in OPTIONS if "in place" not in o])
def test_two_backward_passes(device: str, option: str) -> None:
    call = make_call(device, option)
    leaf = call.logits.detach().requires_grad_()
    outputs = call.outputs(leaf * 1)
    weights = [torch.full_like(out, 0.5 + i) for i, out in enumerate(outputs)]
    first = torch.autograd.grad(outputs, leaf, weights, retain_graph=True)
    second = torch.autograd.grad(outputs, leaf, [-2 * weight for weight in weights])
    expected = call.forward_backward()
    _assert_same(first, expected[-1:])
    assert_exact(second[0], -2 * expected[-1])  # but for the sign of zeros


@gpu
def test_new_sizes_and_numbers_compile_nothing(device: str) -> None:
    from ppo_ops.kernels import triton as kernels

    jitted = (kernels.vocab_stats_kernel, kernels.merge_splits_kernel, kernels.logits_grad_kernel)

    def compiled() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in jitted)

    def run(rows: int, vocab: int, temperature: float) -> None:
        logits = torch.zeros(rows, vocab, device=device, requires_grad=True)
        target = torch.zeros(rows, dtype=torch.int64, device=device)
        ppo_ops.logprob_entropy(logits, target, temperature=temperature)[0].sum().backward()

    run(4, 40_000, 0.7)
    before = compiled()
    assert before > 0
    for rows, vocab, temperature in ((1, 40_000, 0.7), (5, 65_536, 1.3), (16, 151_936, 0.5)):
        run(rows, vocab, temperature)
    assert compiled() == before


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_with_cuda_graphs(device: str, dtype: torch.dtype) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    hidden = torch.randn(33, 64, device=device, dtype=dtype)
    weight = torch.randn(1000, 64, device=device, dtype=dtype).requires_grad_()
    target = torch.empty(33, dtype=torch.int64, device=device)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        log_prob, entropy = ppo_ops.logprob_entropy(hidden @ weight.t(), target, temperature=0.7)
        return (log_prob - 0.01 * entropy).sum()

    compiled = torch.compile(loss, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):  # warm up, record, replay
        hidden.normal_()
        target.random_(1000)
        torch.compiler.cudagraph_mark_step_begin()
        value = compiled(hidden, target)
        (grad,) = torch.autograd.grad(value, weight)
        expected = loss(hidden, target)
        (expected_grad,) = torch.autograd.grad(expected, weight)
        # The sum of 33 numbers and the two products may be done in another order.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(grad, expected_grad, rtol=4 * eps, atol=4 * eps * float(expected_grad.abs().max()))
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.fixture
def world_of_one(device: str) -> Iterator[Any]:
    assert not dist.is_initialized()
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@portable
def test_group_of_one(device: str, world_of_one: Any) -> None:
    call = make_call(device, "everything")
    expected = call.forward_backward()
    call.options["group"] = world_of_one
    _assert_same(call.forward_backward(), expected)
    # The operators skip the collective for one rank; here it runs.
    stats = torch.randn(6, 9, device=device)
    gathered = all_gather_stats(stats, 1, world_of_one.group_name)
    assert_exact(gathered, stats.unsqueeze(0))


@portable
@pytest.mark.parametrize("option", ["plain", "mask"])
def test_no_grad_and_inference_mode(device: str, option: str) -> None:
    call: Call = make_call(device, option)
    expected = tuple(out.detach() for out in call.outputs(call.logits.detach().requires_grad_()))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            _assert_same(call.outputs(call.logits), expected)
