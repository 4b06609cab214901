"""The suite's cases on the GPU, and the promises about bits, which only the compiled kernels can break."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ppo_ops
from tests import cases, oracle
from tests.gpu.devices import GPU, OPTIONS, check, gpu, make_call, moved, portable, portable_cases, run_on
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Several programs a row in the forward kernel, and an odd number of columns: rows are off alignment.
LONG = 70_001 if GPU else 4001


@portable_cases(cases.handed(), on_cpu=4)
def test_handed_case(device: str, case: cases.Case) -> None:
    logits = moved(case.logits, device).requires_grad_()
    target = moved(case.target, device)
    mask = None if case.keep_mask is None else moved(case.keep_mask, device)
    options = case.options()
    if isinstance(case.temperature, Tensor):
        options["temperature"] = case.temperature.to(device)
    log_prob, entropy = ppo_ops.logprob_entropy(logits, target, mask, **options)
    case.expected.check("log_prob", log_prob.detach().cpu())
    case.expected.check("entropy", entropy.detach().cpu())
    for name, result in (("grad_log_prob", log_prob), ("grad_entropy", entropy)):
        case.expected.check(name, torch.autograd.grad(result.sum(), logits, retain_graph=True)[0].cpu())
    alone = ppo_ops.logprob(logits.detach(), target, mask, **options)
    case.expected.check("log_prob", alone.cpu())


@portable_cases(cases.generated(), on_cpu=9)
def test_case_of_the_cpu_suite(device: str, case: cases.Case) -> None:
    """Within budget of the truth, and as good as the CPU's kernels."""
    ours = run_on(device, case)
    check(ours, case)
    if device != "cpu":
        check(ours, case, near=run_on("cpu", case))


@portable_cases(cases.generated(), on_cpu=11)
def test_in_place_gives_the_same_bits(device: str, case: cases.Case) -> None:
    if not case.logits.is_contiguous():
        case = cases.random_case("in place instead", 3, 129)

    def over(logits: Tensor, *args: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        return ppo_ops.logprob_entropy(logits * 1, *args, inplace_backward=True, **options)

    for ours, expected in zip(run_on(device, case, over), run_on(device, case), strict=True):
        assert_same_bits(ours, expected)


@portable
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_kept_sets_equal_the_mask(device: str, dtype: torch.dtype, inplace: bool) -> None:
    rows, vocab = 9, 1025
    case = cases.random_case("ragged_values", rows, vocab, dtype, temperature=0.7)
    case.target[4] = -100
    mask = cases.random_mask("ragged", rows, vocab)
    mask[1:3] = True
    mask[3] = False
    mask[3, 5] = True
    listed = [row.nonzero().squeeze(1) for row in mask]
    listed = [torch.cat([ids.flip(0), ids[:2]]) for ids in listed]  # descending, and two said twice
    listed[1] = listed[1][:0]  # unrestricted
    ids = torch.cat(listed).to(torch.int32).to(device)
    offsets = torch.tensor([0, *map(len, listed)]).cumsum(0).to(device)

    def results(kept: dict[str, Tensor]) -> tuple[Tensor, ...]:
        leaf = case.logits.to(device).requires_grad_()
        outputs = ppo_ops.logprob_entropy(
            leaf * 1, case.target.to(device), temperature=0.7, inplace_backward=inplace, **kept
        )
        weights = [torch.linspace(-1, 2, rows, device=device).to(outputs[0].dtype)] * 2
        return (*(out.detach() for out in outputs), torch.autograd.grad(outputs, leaf, weights)[0])

    ragged, masked = results({"keep_ids": ids, "keep_offsets": offsets}), results({"keep_mask": mask.to(device)})
    # The same sums in another order: a few roundings of the accumulation dtype, then one of the gradient's.
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for number, (ours, expected) in enumerate(zip(ragged, masked, strict=True)):
        rtol = max(8 * eps, torch.finfo(dtype).eps if number == 2 else 0.0)
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=8 * eps)


@gpu
@pytest.mark.parametrize("option", ["plain", "mask", "ids"])
def test_target_out_of_range_is_nan(device: str, option: str) -> None:
    call = make_call(device, option, rows=7, vocab=1000)
    good = call.forward_backward()
    call.target[0], call.target[2] = 1000, -1
    log_prob, entropy, grad = call.forward_backward()
    bad = torch.tensor([True, False, True, False, False, False, False], device=device)
    assert log_prob[bad].isnan().all()
    assert not log_prob[~bad].isnan().any()
    assert grad[bad].isnan().any(1).all()
    assert_same_bits(grad[~bad], good[2][~bad])
    assert_same_bits(entropy, good[1])


@portable
@pytest.mark.parametrize("option", [o for o in OPTIONS if "in place" not in o])
def test_a_row_alone_has_the_same_bits(device: str, option: str) -> None:
    call = make_call(device, option, rows=6, vocab=LONG)
    whole = call.forward_backward()
    assert not any(result.isnan().any() for result in whole)
    for row in (0, 1, 5):
        alone = make_call(device, option, rows=1, vocab=LONG)
        alone.logits.copy_(call.logits[row : row + 1])
        alone.target.copy_(call.target[row : row + 1])
        for name, value in call.options.items():
            if name == "keep_ids":
                first, last = call.options["keep_offsets"][row : row + 2].tolist()
                alone.options[name] = value[first:last]
                alone.options["keep_offsets"] = torch.tensor([0, last - first], device=device)
            elif isinstance(value, Tensor) and name != "keep_offsets":
                alone.options[name] = value[row : row + 1] if value.dim() else value
        for ours, expected in zip(alone.forward_backward(), whole, strict=True):
            assert_same_bits(ours, expected[row : row + 1])


@portable
@pytest.mark.parametrize("option", OPTIONS)
def test_runs_give_the_same_bits(device: str, option: str) -> None:
    call = make_call(device, option, dtype=torch.bfloat16)
    first = call.forward_backward()
    for _ in range(3 if GPU else 1):
        for ours, expected in zip(call.forward_backward(), first, strict=True):
            assert_same_bits(ours, expected)


def _layouts(tensor: Tensor) -> dict[str, Tensor]:
    """The same numbers in other memory: rows on 16 bytes, one element off them, columns with a stride."""
    rows, width = tensor.shape
    room = tensor.new_empty(rows, (width // 16 + 2) * 16)
    return {
        "aligned": room[:, :width].copy_(tensor),
        "off": tensor.new_empty(rows, room.shape[1])[:, 1 : width + 1].copy_(tensor),
        "strided": tensor.repeat_interleave(2, 1)[:, ::2],
        "transposed": tensor.t().contiguous().t(),
    }


@portable
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_have_the_same_bits(device: str, dtype: torch.dtype, masked: bool) -> None:
    """The alignment of a row decides which code is compiled for it."""
    case = cases.random_case("layouts", 4, LONG, dtype, keep_mask=cases.random_mask("layouts", 4, LONG))
    target = case.target.to(device)
    mask = case.keep_mask.to(device) if masked else None

    def results(logits: Tensor, keep_mask: Tensor | None) -> tuple[Tensor, ...]:
        x = logits.detach().requires_grad_()
        outputs = ppo_ops.logprob_entropy(x, target, keep_mask)
        alone = ppo_ops.logprob(x, target, keep_mask)
        weights = [torch.ones_like(out) for out in (*outputs, alone)]
        return (*outputs, alone, *torch.autograd.grad((*outputs, alone), x, weights))

    logits = case.logits.to(device)
    expected = results(logits, mask)
    for name, other in _layouts(logits).items():
        masks = [mask] if mask is None else [mask, _layouts(mask)[name]]
        for keep_mask in masks:
            for ours, right in zip(results(other, keep_mask), expected, strict=True):
                assert_same_bits(ours.detach(), right.detach())


@portable
def test_no_rows_and_no_columns(device: str) -> None:
    for rows, vocab in ((0, 7), (0, 0)):
        logits = torch.zeros(rows, vocab, device=device, requires_grad=True)
        target = torch.zeros(rows, dtype=torch.int64, device=device)
        log_prob, entropy = ppo_ops.logprob_entropy(logits, target)
        (log_prob + entropy).sum().backward()
        assert logits.grad is not None
        assert log_prob.shape == (0,)
        assert oracle.Results(log_prob, entropy, logits.grad).grad_logits.shape == (rows, vocab)
