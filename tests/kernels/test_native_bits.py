"""The native CPU kernels' bits depend on no layout, no thread and no other row."""

import pytest
import torch

from ppo_ops.kernels import native
from tests.kernels.native_tools import DTYPES, NAN, Case, bits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("isa")
def test_in_place_gradient_has_the_same_bits(dtype):
    for columns in (7, 129, 5000):
        for kinds in (4, 6):
            case = Case(columns, dtype, kinds, masked=kinds == 6)
            normalizers = case.normalizers().float()
            expected = case.grad(normalizers)
            assert case.grad(normalizers, out=case.logits) is case.logits
            assert torch.equal(bits(case.logits), bits(expected))


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("kinds", [4, 6])
def test_threads_do_not_change_bits(kinds, pool):
    """Many rows over one row's memory: enough work for a second thread, made by the kernels where there is no pool."""
    case = Case(32000, kinds=kinds, masked=kinds == 6).rows(torch.arange(300) % 6)
    case.logits = case.logits[:1].expand(300, -1)
    normalizers = case.normalizers().float()
    results = []
    try:
        if not pool:
            native._library.ppo_set_parallel(None)
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append((bits(case.stats()), bits(case.grad(normalizers))))
    finally:
        native._share_thread_pool(native._library)
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        assert torch.equal(result[1], results[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("isa")
def test_a_row_alone_has_the_same_bits_at_any_alignment(dtype):
    case = Case(2600, dtype, kinds=6, masked=True, temperature="each")
    normalizers = case.normalizers().float()
    stats, grad = case.stats(), case.grad(normalizers)
    for row in range(5):
        for offset in (0, 1, 3):
            alone = case.rows(slice(row, row + 1))
            width = alone.logits.shape[1]
            alone.logits = torch.empty(width + 8, dtype=dtype)[offset : offset + width].copy_(alone.logits[0])[None]
            alone.mask = torch.empty(width + 8, dtype=torch.bool)[offset : offset + width].copy_(alone.mask[0])[None]
            assert torch.equal(bits(alone.stats()), bits(stats[:, row : row + 1]))
            assert torch.equal(bits(alone.grad(normalizers[:, row : row + 1])), bits(grad[row : row + 1]))


def test_strides():
    """Expanded, transposed and strided arguments give the bits of contiguous ones."""
    plain = Case(300, kinds=6, masked=True, temperature="each")
    normalizers = plain.normalizers().float()
    stats, grad = plain.stats(), plain.grad(normalizers)
    other = plain.rows(slice(None))
    other.logits = plain.logits.t().contiguous().t()
    other.mask = plain.mask.repeat_interleave(2, 1)[:, ::2]
    other.target = torch.stack([plain.target] * 2, 1)[:, 0]
    other.temperature = torch.stack([plain.temperature] * 3, 1)[:, 1]
    other.upstream = [torch.stack([g, g], 1)[:, 1] for g in plain.upstream]
    for logits in (other.logits, plain.logits):
        other.logits = logits
        assert torch.equal(bits(other.stats()), bits(stats))
        assert torch.equal(bits(other.grad(normalizers)), bits(grad))
    other.logits = plain.logits.t().contiguous().t()
    other.grad(normalizers, out=other.logits)
    assert torch.equal(bits(other.logits), bits(grad))

    for out in (torch.full((6, 50), NAN)[:, 10:16], torch.full((12, 6), NAN)[::2]):
        native.vocab_stats(plain.logits, plain.target, plain.mask, plain.temperature, out, **plain.shape)
        assert torch.equal(bits(out), bits(stats))


def test_expanded_rows_and_upstream():
    case = Case(300, kinds=6, masked=True)
    one = case.rows(slice(1, 2))
    normalizers = one.normalizers().float()
    stats, grad = one.stats(), one.grad(normalizers)
    one.logits, one.mask, one.target = one.logits.expand(4, -1), one.mask.expand(4, -1), one.target.expand(4)
    one.upstream = [g.expand(4) for g in one.upstream]
    assert torch.equal(one.stats(), stats.expand(-1, 4))
    out = torch.full((4, 303), NAN)
    assert torch.equal(one.grad(normalizers.expand(-1, 4).contiguous(), out=out), grad.expand(4, -1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_target_dtypes(dtype):
    case = Case(100)
    case.start = 0
    case.target = torch.tensor([0, 99, 50, 100, 99, 99])
    expected = case.stats()
    case.target = case.target.to(dtype)
    assert torch.equal(bits(case.stats()), bits(expected))
