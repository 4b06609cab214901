"""Two GPUs: a device that is not the current one, and tensor parallelism over NCCL. Not collected with one GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ppo_ops
from tests import cases
from tests.gpu.devices import OPTIONS, make_call
from tests.tolerances import assert_exact, assert_same_bits

TIME_LIMIT_S = 120


def _rank(rank: int, folder: str, backend: str) -> None:
    """This rank's half of the vocabulary; the outputs and the gradient go to a file."""
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        case = cases.random_case("two_gpus", 9, 1024, keep_mask=cases.random_mask("two_gpus", 9, 1024))
        mine = slice(512 * rank, 512 * (rank + 1))
        logits = case.logits[:, mine].to(device).requires_grad_()
        arguments = (logits, case.target.to(device), case.keep_mask[:, mine].to(device))
        outputs = ppo_ops.logprob_entropy(*arguments, temperature=0.7, group=dist.group.WORLD)
        grads = torch.autograd.grad(outputs, logits, [torch.ones_like(out) for out in outputs])
        torch.save([t.detach().cpu() for t in (*outputs, *grads)], Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def tensor_parallel(backend: str) -> None:
    """Body of the test, on a backend of choice."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_rank, args=(folder, backend), nprocs=2, join=False, start_method="spawn")
        try:
            while not context.join(TIME_LIMIT_S):
                pass
        finally:
            for process in context.processes:
                process.kill()
        first, second = (torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(2))
    case = cases.random_case("two_gpus", 9, 1024, keep_mask=cases.random_mask("two_gpus", 9, 1024))
    logits = case.logits.double().requires_grad_()
    truth = ppo_ops.reference.logprob_entropy(logits, case.target, case.keep_mask, temperature=0.7)
    (grad,) = torch.autograd.grad(truth, logits, [torch.ones_like(out) for out in truth])
    for ours, other, right in zip(first, second, truth, strict=False):
        assert_same_bits(ours, other)
        # Logits of standard deviation 4 over a temperature of 0.7: float32 rounds at 32, to 4e-6.
        torch.testing.assert_close(ours.double(), right.detach(), rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(torch.cat([first[2], second[2]], 1).double(), grad, rtol=1e-4, atol=1e-5)


if torch.cuda.device_count() >= 2:

    def test_tensor_parallel() -> None:
        tensor_parallel("nccl")

    def test_a_device_that_is_not_the_current_one() -> None:
        for option in OPTIONS:
            with torch.cuda.device(0):
                first, other = make_call("cuda:0", option), make_call("cuda:1", option)
                for name in ("logits", "target"):
                    getattr(other, name).copy_(getattr(first, name))
                for name, value in first.options.items():
                    if isinstance(value, torch.Tensor):
                        other.options[name].copy_(value)
                for a, b in zip(first.forward_backward(), other.forward_backward(), strict=True):
                    assert b.device.index == 1
                    assert_exact(a.cpu(), b.cpu())

elif not torch.cuda.is_available():

    def test_tensor_parallel_on_the_cpu() -> None:
        tensor_parallel("gloo")
