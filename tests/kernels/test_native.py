"""The native CPU kernels against float64 torch, and their bits against themselves.

Tolerance: |ours - truth| <= 2 |plain float32 torch - truth| + floor. The floor is 2^-21 (four float32 roundings to
nearest) of the magnitudes that enter a number: a single row of plain torch may be right by chance. A gradient may in
addition be off by one unit in the last place of its own dtype: rounded once, from a neighbour in float32.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ppo_ops.kernels import native

ROOT = Path(__file__).parents[2]
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLUMNS = [0, 1, 2, 3, 7, 15, 16, 17, 127, 129, 1000, 1025, 4097, 32000]
FLOOR = 2.0**-21
IGNORE = -100

if not native.available():
    pytest.skip(f"native kernels: {native.why_unavailable()}", allow_module_level=True)


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def isa(request):
    if native._library.ppo_choose(request.param.encode()) is None:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    native._library.ppo_choose(native.instruction_set().encode())


@pytest.fixture(autouse=True)
def one_thread():
    """The oracle's small operators lose more to a thread pool than they win."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case:
    """Arguments of both kernels. Everything that must not be read is NaN: padding, slack between rows, ignored rows."""

    def __init__(
        self, columns, dtype=torch.float32, kinds=4, masked=False, temperature=None, rows=6, scale=3.0, seed=0
    ):
        generator = torch.Generator().manual_seed(1000 * columns + seed)
        padding, slack, self.start = 3, 5, 700
        storage = torch.full((rows, columns + padding + slack), NAN, dtype=dtype)
        self.logits = storage[:, : columns + padding]
        self.logits[:, :columns] = (scale * torch.randn(rows, columns, generator=generator)).to(dtype)
        self.columns, self.kinds = columns, kinds
        # The first and last column, one in between, not owned by this shard on either side, ignored.
        local = torch.tensor([0, columns - 1, columns // 2, -1, columns, IGNORE - self.start])
        self.target = local.repeat(rows)[:rows] + self.start
        self.logits[self.target == IGNORE] = NAN
        self.mask = None
        if masked:
            self.mask = torch.rand(rows, columns + padding, generator=generator) < 0.4
        self.temperature = {
            None: None,
            "one": torch.tensor([0.7]),
            "each": torch.rand(rows, generator=generator) + 0.5,
        }[temperature]
        self.upstream = list(torch.randn(2, rows, generator=generator))

    @property
    def shape(self):
        return {"ignore_index": IGNORE, "vocab_start": self.start, "columns": self.columns}

    def rows(self, rows):
        """The same case, of these rows only; views."""
        part = object.__new__(Case)
        part.__dict__.update(self.__dict__)
        part.logits, part.target = self.logits[rows], self.target[rows]
        part.mask = None if self.mask is None else self.mask[rows]
        if self.temperature is not None and len(self.temperature) > 1:
            part.temperature = self.temperature[rows]
        part.upstream = [g[rows] for g in self.upstream]
        return part

    def stats(self):
        out = torch.full((self.kinds, len(self.target)), NAN)
        native.vocab_stats(self.logits, self.target, self.mask, self.temperature, out, **self.shape)
        return out

    def grad(self, normalizers, upstream=(0, 1), out=None):
        out = torch.full_like(self.logits, NAN) if out is None else out
        given = [self.upstream[i] if i in upstream else None for i in (0, 1)]
        native.logits_grad(
            self.logits,
            self.target,
            self.mask,
            self.temperature,
            normalizers,
            *given,
            out,
            vocab_size=10**6,
            **self.shape,
        )
        return out

    def kept(self):
        kept = torch.ones_like(self.logits[:, : self.columns], dtype=torch.bool)
        if self.mask is not None:
            kept = self.mask[:, : self.columns].clone()
            local = self.target - self.start
            owned = (local >= 0) & (local < self.columns)
            kept[owned, local[owned]] = True
        return kept

    def inverse(self, dtype):
        ones = torch.ones(len(self.target), 1, dtype=dtype)
        return ones if self.temperature is None else ones / self.temperature.to(dtype).unsqueeze(1)

    def plain_stats(self, dtype):
        x, kept = self.logits[:, : self.columns].to(dtype), self.kept()
        local = self.target - self.start
        owned = (local >= 0) & (local < self.columns)
        picked = torch.full((len(x),), NAN, dtype=dtype)
        picked[owned] = x[owned, local[owned]]

        def sums(values):
            top = values.amax(1) if values.shape[1] else values.new_full((len(values),), -INF)
            z = (values - top.masked_fill(top == -INF, 0).unsqueeze(1)) * self.inverse(dtype)
            e = z.exp()
            return top, e.sum(1), (e * z).masked_fill(values == -INF, 0).sum(1)

        full, lp = sums(x), sums(x.masked_fill(~kept, -INF))
        out = torch.stack([*lp[:2], picked, full[2], full[0], full[1]])[: self.kinds]
        ignored = torch.tensor([0, 1, 0, 0, 0, 1], dtype=dtype)[: self.kinds]
        return torch.where(self.target == IGNORE, ignored.unsqueeze(1), out)

    def normalizers(self, dtype=torch.float64):
        """What one shard's statistics merge into; a target that this shard lacks is given a logit by another."""
        s = self.plain_stats(dtype)
        out = [s[0], s[1].log(), s[2].nan_to_num(0.0)]
        if self.kinds > 3:
            total = s[-1] if self.kinds == 6 else s[1]
            out.append(total.log() - s[3] / total)
        return torch.stack(out + ([s[4], s[5].log()] if self.kinds == 6 else []))

    def plain_grad(self, normalizers, dtype, upstream=(0, 1)):
        """Gradient and the magnitude of the numbers that were added up to it."""
        x, n = self.logits[:, : self.columns].to(dtype), normalizers.to(dtype).unsqueeze(2)
        a, b = (
            (self.upstream[i].to(dtype).unsqueeze(1) if i in upstream else torch.zeros(len(x), 1, dtype=dtype))
            * self.inverse(dtype)
            for i in (0, 1)
        )
        local = self.target - self.start
        one = (torch.arange(self.columns) == local.unsqueeze(1)).to(dtype)
        log_p_lp = ((x - n[0]) * self.inverse(dtype) - n[1]).clamp(min=-1e4)
        p_lp = torch.where(self.kept(), log_p_lp.exp(), 0)
        grad, size = a * (one - p_lp), a.abs() * (one + p_lp * (1 + log_p_lp.abs()))
        if 1 in upstream:
            full = 4 if self.kinds == 6 else 0
            log_p = ((x - n[full]) * self.inverse(dtype) - n[full + 1]).clamp(min=-1e4)
            p = log_p.exp()
            grad = grad - b * p * (log_p + n[3])
            # Rounding the exponent is a relative error of p as large as the exponent; log p + H may cancel.
            cancelling = log_p.abs() + n[3].abs() + n[full + 1].abs()
            size = size + b.abs() * p * (1 + log_p.abs() * (log_p + n[3]).abs() + cancelling)
        dead = (self.target == IGNORE).unsqueeze(1)
        return grad.masked_fill(dead, 0), size.masked_fill(dead, 0)


def assert_budget(ours, truth, plain, size):
    ours, plain = ours.double(), plain.double()
    assert torch.equal(ours.isnan(), truth.isnan())
    infinite = truth.isinf()
    assert torch.equal(ours[infinite], truth[infinite])
    excess = (ours - truth).abs() - 2 * (plain - truth).abs() - FLOOR * size
    excess = excess[~(truth.isnan() | infinite)]
    assert excess.numel() == 0 or excess.max() <= 0, excess.max()


def check_stats(case):
    truth = case.plain_stats(torch.float64)
    assert_budget(case.stats(), truth, case.plain_stats(torch.float32), truth.abs())


def check_grad(case):
    for upstream in [(0, 1), (0,), (1,)] if case.kinds > 3 else [(0,)]:
        check_grad_for(case, upstream)


def check_grad_for(case, upstream):
    normalizers = case.normalizers().float()
    ours = case.grad(normalizers, upstream)
    assert (ours[:, case.columns :] == 0).all()
    truth, size = case.plain_grad(normalizers.double(), torch.float64, upstream)
    plain = case.plain_grad(normalizers, torch.float32, upstream)[0]
    eps, tiny = torch.finfo(ours.dtype).eps, torch.finfo(ours.dtype).smallest_normal
    rounding = eps * truth.abs() + tiny * eps if ours.dtype != torch.float32 else 1e-37
    assert_budget(ours[:, : case.columns], truth, plain, size + rounding / FLOOR)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


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

    wide = torch.full((6, 2 * len(stats)), NAN).t()[::2]
    native.vocab_stats(
        plain.logits, plain.target, plain.mask, plain.temperature, wide.t().contiguous().t(), **plain.shape
    )
    padded = torch.full((6, 50), NAN)[:, 10:16]
    native.vocab_stats(plain.logits, plain.target, plain.mask, plain.temperature, padded, **plain.shape)
    assert torch.equal(bits(padded), bits(stats))


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


def test_no_rows_and_huge_targets():
    case = Case(16)
    case.rows(slice(0, 0)).stats()
    case.rows(slice(0, 0)).grad(torch.empty(4, 0))
    case.target = torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**40, IGNORE])
    assert case.stats()[2, :5].isnan().all()


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_environment_switches(monkeypatch):
    monkeypatch.setenv("PPO_OPS_NATIVE_ISA", "vax")
    assert native._load() == (None, "this CPU does not run PPO_OPS_NATIVE_ISA=vax")
    monkeypatch.setenv("PPO_OPS_NATIVE_ISA", "baseline")
    assert native._load()[1] == "baseline"
    monkeypatch.setenv("PPO_OPS_NATIVE", "0")
    assert native._load() == (None, "turned off by PPO_OPS_NATIVE=0")
    native._library.ppo_choose(native.instruction_set().encode())
    assert native.supports(torch.float16)
    assert not native.supports(torch.float64)
    monkeypatch.setattr(native, "_library", None)
    assert not native.available()
    assert not native.supports(torch.float16)


def test_missing_library(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_native.so")
    assert "no C compiler worked" in native._load()[1]
    native.LIBRARY.write_text("not a library")
    assert native._load()[0] is None


def test_a_forked_child_does_not_hang():
    """The pool's threads are not in the child; it makes its own."""
    code = """
import os, torch
from ppo_ops.kernels import native
torch.set_num_threads(2)
logits, target, out = torch.zeros(64, 32000), torch.zeros(64, dtype=torch.int64), torch.empty(3, 64)
run = lambda: native.vocab_stats(logits, target, None, None, out, ignore_index=-100, vocab_start=0, columns=32000)
run()
child = os.fork()
if child == 0:
    run()
    os._exit(0 if (out[1] == 32000).all() else 1)
print(os.waitpid(child, 0)[1])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "0", run.stderr


def test_install_survives_a_broken_compiler(tmp_path):
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib"), "-t", str(tmp_path / "tmp")]
    result = subprocess.run(
        build, cwd=ROOT, env={**os.environ, "CC": "false"}, capture_output=True, text=True, timeout=120, check=True
    )
    assert "ATen kernels" in result.stdout + result.stderr
    assert not list(tmp_path.rglob("*.so"))
