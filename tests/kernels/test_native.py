"""The native CPU kernels against float64 torch, on every instruction set of this machine, special values among them."""

import pytest
import torch

from tests.kernels.native_tools import DTYPES, FLOOR, IGNORE, INF, NAN, Case, bits, check_grad, check_stats

COLUMNS = [0, 1, 2, 3, 7, 15, 16, 17, 127, 129, 1000, 1025, 4097, 32000]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kinds", "masked"), [(3, False), (3, True), (4, False), (6, True)])
@pytest.mark.usefixtures("isa")
def test_stats_and_grad_against_float64(dtype, kinds, masked, columns):
    temperature = [None, "one", "each"][columns % 3]
    case = Case(columns, dtype, kinds, masked, temperature)
    check_stats(case)
    check_grad(case)


@pytest.mark.parametrize("temperature", [None, "one", "each"])
@pytest.mark.usefixtures("isa")
def test_temperature(temperature):
    for kinds, masked in [(4, False), (6, True)]:
        check_stats(Case(129, kinds=kinds, masked=masked, temperature=temperature))
        check_grad(Case(129, kinds=kinds, masked=masked, temperature=temperature))


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e3, 1e30, 3e38])
@pytest.mark.usefixtures("isa")
def test_extreme_temperature_with_absent_columns(temperature):
    for kinds in (4, 6):
        case = Case(129, kinds=kinds, masked=kinds == 6)
        case.temperature = torch.tensor([temperature])
        case.logits[:, 40:60] = -INF
        check_stats(case)
        assert (case.grad(case.normalizers().float())[:, 40:60] == 0).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN])
def test_temperature_that_is_not_positive_gives_nan(bad):
    case = Case(129, temperature="each")
    case.temperature[0] = bad
    stats, grad = case.stats(), case.grad(case.normalizers().float())
    assert stats[[0, 1, 3], 0].isnan().all()
    assert not stats[:2, 1].isnan().any()
    assert grad[0, :129].isnan().all()
    assert not grad[1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kinds", "masked"), [(3, True), (4, False), (6, True)])
@pytest.mark.usefixtures("isa")
def test_minus_inf(dtype, kinds, masked):
    case = Case(5000, dtype, kinds, masked)
    case.logits[0, :4500] = -INF  # two whole blocks first, the target among them
    case.logits[1, 1:5000:2] = -INF
    case.logits[2, :5000] = -INF  # everything
    case.logits[3, :4999] = -INF  # one survivor
    if masked:
        case.mask[3, :4999] = True
    check_stats(case)
    finite = case.rows(torch.tensor([0, 1, 3]))
    check_grad(finite)
    absent = (finite.logits == -INF).scatter_(1, (finite.target - finite.start).clamp(0, 4999).unsqueeze(1), False)
    assert (finite.grad(finite.normalizers().float(), (0, 1)[: kinds - 2])[absent] == 0).all()


@pytest.mark.parametrize("special", ["nan", "negative nan", "inf"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 1, 2100, 4096])
@pytest.mark.usefixtures("isa")
def test_nan_and_inf_stay_in_their_row(dtype, column, special):
    clean = Case(4097, dtype)
    case = Case(4097, dtype)
    case.logits[1, column] = INF if special == "inf" else NAN
    if special == "negative nan":  # every bit set: rounding must not carry into the sign
        case.logits.view(torch.int32 if dtype == torch.float32 else torch.int16)[1, column] = -1
    stats, normalizers = case.stats(), clean.normalizers().float()
    assert stats[1, 1].isnan()
    assert stats[0, 1].isnan() or (special == "inf" and stats[0, 1] == INF)
    others = torch.tensor([0, 2, 3, 4, 5])
    assert torch.equal(bits(stats[:, others]), bits(clean.stats()[:, others]))
    normalizers[:, 1] = NAN
    grad = case.grad(normalizers)
    assert grad[1, :4097].isnan().all()
    assert torch.equal(bits(grad[others]), bits(clean.grad(clean.normalizers().float())[others]))
    if column:  # statistics from elsewhere: the element itself still gives NaN
        finite = clean.normalizers().float()
        assert case.grad(finite)[1, column].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("isa")
def test_nan_in_a_dropped_column(dtype):
    """Is not seen by the kept set's numbers, nor by a gradient of the log-prob alone."""
    for kinds in (3, 6):
        case = Case(3000, dtype, kinds, masked=True)
        case.mask[:, 7] = False
        case.logits[:, 7] = -50.0
        clean, normalizers = case.stats(), case.normalizers().float()
        for special in (NAN, INF):
            case.logits[:, 7] = special
            torch.testing.assert_close(case.stats()[:3], clean[:3], rtol=FLOOR, atol=0, equal_nan=True)
            grad = case.grad(normalizers, upstream=(0,))
            assert not grad.isnan().any()
            assert (grad[:, 7] == 0).all()
            if kinds == 6:
                assert case.stats()[[3, 5]][:, :5].isnan().all()


@pytest.mark.parametrize("kinds", [4, 6])
@pytest.mark.parametrize("offset", [1e6, 1e8, -1e8])
@pytest.mark.usefixtures("isa")
def test_a_common_offset_changes_nothing(offset, kinds):
    case = Case(3000, kinds=kinds, masked=kinds == 6, temperature="one")
    case.logits[:, :3000] = (case.logits[:, :3000] / 8).round() * 8  # exact at the offset
    expected = case.stats(), case.grad(case.normalizers().float())
    normalizers = case.normalizers().float()
    case.logits += offset
    stats = case.stats()
    normalizers[[0, 4][: 2 if kinds == 6 else 1]] += offset
    normalizers[2] += offset
    not_sums = [0, 2, 4][: 3 if kinds == 6 else 2]
    stats[not_sums] -= offset
    live = torch.arange(5)
    assert torch.equal(stats[:, live].nan_to_num(), expected[0][:, live].nan_to_num())
    assert torch.equal(case.grad(normalizers), expected[1])


@pytest.mark.parametrize("gap", [-500.0, -30.0, -12.0, -5.0, 5.0, 12.0, 500.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("isa")
def test_kept_set_far_from_the_rest(dtype, gap):
    """The kept logits lie `gap` above the dropped ones: one shared exponential would overflow or lose them all."""
    case = Case(5000, dtype, kinds=6, masked=True, scale=1.0)
    kept = case.mask[:, :5000]
    kept[1] = False  # one survivor, which the mask dropped: the target
    case.logits[:, :5000] = torch.where(case.kept(), case.logits[:, :5000] + gap, case.logits[:, :5000])
    check_stats(case)
    check_grad(case)


def test_zero_upstream_gives_zero_whatever_the_statistics():
    case = Case(129, kinds=6, masked=True)
    normalizers = case.normalizers().float()
    full = case.grad(normalizers, (0,)), case.grad(normalizers, (1,))
    spoiled = normalizers.clone()
    spoiled[3:] = NAN
    case.upstream[1].zero_()
    assert torch.equal(case.grad(spoiled), full[0])
    case.upstream = [torch.zeros(6), Case(129, kinds=6, masked=True).upstream[1]]
    spoiled = normalizers.clone()
    spoiled[:3] = NAN
    assert torch.equal(case.grad(spoiled), full[1])
    case.upstream[1].zero_()
    case.logits.fill_(NAN)
    assert torch.equal(case.grad(torch.full_like(normalizers, NAN)), torch.zeros_like(case.logits))


def test_target_that_nobody_owns_gives_nan_gradient():
    case = Case(129)
    normalizers = case.normalizers().float()
    normalizers[2, 1] = NAN
    grad = case.grad(normalizers)
    assert grad[1, :129].isnan().all()
    assert (grad[1, 129:] == 0).all()
    assert not grad[[0, 2, 3, 4, 5]].isnan().any()
    assert not case.grad(normalizers, (1,)).isnan().any()


def test_no_rows_and_huge_targets():
    case = Case(16)
    case.rows(slice(0, 0)).stats()
    case.rows(slice(0, 0)).grad(torch.empty(4, 0))
    case.target = torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**40, IGNORE])
    assert case.stats()[2, :5].isnan().all()
