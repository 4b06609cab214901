"""What the Triton kernels compile to, without a device.

    python -m benchmarks.triton_compile            every compiled kernel
    python -m benchmarks.triton_compile --readme   writes the shorter table of the README's section On a GPU

The launchers run on meta tensors with a recorder in place of the kernel, so what is compiled is what they would launch:
the same arguments, options and grid.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import torch

ROWS, VOCABULARY = 8192, 151_936
KERNELS = ("vocab_stats_kernel", "merge_splits_kernel", "logits_grad_kernel", "entries_kernel")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """A call of a launcher; `layout` is "aligned", "odd" (rows are no multiple of 16 bytes) or "strided" (columns)."""

    kernel: str
    dtype: torch.dtype
    kinds: int
    masked: bool = False
    layout: str = "aligned"
    temperature: bool = True
    upstream: str = "both"
    rows: int = ROWS
    columns: int = VOCABULARY

    def __str__(self) -> str:
        parts = [self.kernel, str(self.dtype).removeprefix("torch."), f"K={self.kinds}"]
        parts += ["mask"] if self.masked else []
        parts += [self.layout] if self.layout != "aligned" else []
        parts += [] if self.temperature else ["T=1"]
        parts += [self.upstream] if self.upstream != "both" and self.kinds > 3 else []
        return " ".join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """A recorded launch: the jitted function, its grid, its arguments by name, the compiler's options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: frozenset[str]
    options: dict[str, Any]


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **more: Any) -> None:
            names = self.kernel.arg_names
            options = {name: more.pop(name) for name in list(more) if name not in names}
            values = {**dict(zip(names, args, strict=False)), **more}
            constants = {*more, *(name for name, value in values.items() if value is None)}
            self.launches.append(Launch(self.kernel, grid, values, frozenset(constants), options))

        return launch


@functools.cache
def launch(spec: Spec) -> Launch:
    """What the launcher would launch for a call."""
    from ppo_ops.kernels import triton as kernels

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, columns = spec.rows, spec.columns + (spec.layout == "odd")

    def matrix(dtype: torch.dtype) -> torch.Tensor:
        return empty(columns, rows, dtype=dtype).t() if spec.layout == "strided" else empty(rows, columns, dtype=dtype)

    accumulation = torch.float64 if spec.dtype == torch.float64 else torch.float32
    logits, target = matrix(spec.dtype), empty(rows, dtype=torch.int64)
    keep_mask = matrix(torch.bool) if spec.masked else None
    temperature = empty(rows, dtype=accumulation) if spec.temperature else None
    per_row = empty(spec.kinds, rows, dtype=accumulation)
    where = {"ignore_index": -100, "vocab_start": 0, "columns": columns}
    launches: list[Launch] = []
    recorders = {name: _Recorder(getattr(kernels, name), launches) for name in KERNELS}
    with mock.patch.multiple(kernels, **recorders):
        if spec.kernel == "backward":
            a = None if spec.upstream == "entropy" else per_row[0]
            b = None if spec.upstream == "log_prob" or spec.kinds == 3 else per_row[0]
            kernels.logits_grad(logits, target, keep_mask, temperature, per_row, a, b, matrix(spec.dtype), **where)
        elif spec.kernel == "entries":
            offsets = empty(rows + 1, dtype=torch.int64)
            kernels.softmax_of_entries(empty(64 * rows, dtype=accumulation), offsets, temperature)
        else:
            kernels.vocab_stats(logits, target, keep_mask, temperature, per_row, **where)
    return launches[spec.kernel == "merge"]


@dataclasses.dataclass(frozen=True)
class Compiled:
    registers: int
    stack: int
    local: int
    shared: int
    ttir: str
    ttgir: str
    ptx: str

    def count(self, pattern: str) -> int:
        """Occurrences of a regular expression in the PTX."""
        return len(re.findall(pattern, self.ptx))


def signature(recorded: Launch) -> tuple[dict[str, str], dict[str, Any]]:
    """Types and constants of a launch, as the compiler takes them."""
    types, constants = {}, {}
    for name, value in recorded.arguments.items():
        if name in recorded.constants:
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name] = TYPES[value.dtype]
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
    return types, constants


@functools.cache
def compiled(spec: Spec, capability: int) -> Compiled:
    """The kernel of a call, compiled for an architecture; Triton caches it on disk."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    recorded = launch(spec)
    source = ASTSource(recorded.kernel, *signature(recorded))
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=recorded.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    texts = (kernel.asm[name] for name in ("ttir", "ttgir", "ptx"))
    return Compiled(registers, stack, local, kernel.metadata.shared, *texts)


def programs_per_sm(registers: int, threads: int) -> int:
    """Programs that fit on an SM: 65,536 registers in units of 8 a thread, 2048 threads, 32 programs."""
    return min(65_536 // (-(-registers // 8) * 8 * threads), 2048 // threads, 32)


def in_flight(spec: Spec, registers: int) -> int:
    """Bytes that an SM's programs have in flight when each has issued the loads of one block."""
    arguments = launch(spec).arguments
    threads = 32 * launch(spec).options["num_warps"]
    if spec.kernel == "forward":
        block = arguments["UNROLL"] * arguments["LANES"] * arguments["VECTOR"]
    else:
        block = arguments["BLOCK"]
    return programs_per_sm(registers, threads) * block * (spec.dtype.itemsize + spec.masked)


def block_shape(spec: Spec) -> tuple[int, int, int]:
    """Of a block: loads of logits a thread, elements a load, sets of statistics."""
    arguments = launch(spec).arguments
    vector = arguments["VECTOR"]
    if spec.kernel == "forward":
        return arguments["UNROLL"], vector, 2 if spec.kinds == 6 else 1
    return arguments["BLOCK"] // (32 * launch(spec).options["num_warps"] * vector), vector, 1


def vector_loads(result: Compiled, dtype: torch.dtype) -> int:
    """128-bit loads in the PTX."""
    return result.count(rf"ld\.global[.\w:]*\.{WIDE[dtype == torch.float64]}")


SECTOR = 32
WIDE = (r"v4\.b32", r"v2\.b64")


def traffic(spec: Spec) -> float:
    """Bytes that the launched programs move over the least possible, each number a row counted as a sector of 32 bytes.

    Least: the logits (and mask) once, the statistics or the gradient written once. What the kernels add: numbers a row
    that each program reads, and partial statistics, written and read. That the loads of a compiled program cover its
    block exactly once is for a test to show.
    """
    recorded = launch(spec)
    programs = recorded.grid[0]
    element = spec.rows * spec.columns * (spec.dtype.itemsize + spec.masked)
    number = 8 if spec.dtype == torch.float64 else 4
    if spec.kernel == "backward":
        written = spec.rows * spec.columns * spec.dtype.itemsize
        numbers = 1 + spec.temperature + 2 + spec.kinds  # target, temperature, upstream gradients, normalizers
        return (element + written + programs * numbers * SECTOR) / (element + written)
    result = spec.kinds * spec.rows * number
    splits = programs // spec.rows
    partial = 2 * splits * result if splits > 1 else 0
    numbers = 1 + spec.temperature + 2 * spec.masked + 1 / splits  # target, temperature, mask and logit of the target
    return (element + result + partial + programs * numbers * SECTOR) / (element + result)


def specs() -> list[Spec]:
    """The option matrix."""
    options = [(3, False), (3, True), (4, False), (6, True)]
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return [
        *(Spec(kernel, d, k, m) for kernel in ("forward", "backward") for d in dtypes for k, m in options),
        *(Spec("merge", d, k, k == 6) for d in dtypes[2:] for k in (3, 4, 6)),
        *(Spec("forward", d, k, m, "odd") for d in dtypes[::2] for k, m in options),
        *(Spec("forward", d, 6, True, "strided") for d in dtypes[::2]),
        *(Spec("backward", d, 6, True, layout) for d in dtypes[::2] for layout in ("odd", "strided")),
        *(Spec("backward", torch.bfloat16, k, k == 6, upstream=u) for k in (4, 6) for u in ("log_prob", "entropy")),
        Spec("forward", torch.bfloat16, 4, temperature=False),
        Spec("backward", torch.bfloat16, 4, temperature=False),
    ]


def other_architectures() -> list[tuple[Spec, int]]:
    """Key configurations for the architectures other than sm_90."""
    key = [(k, m, d) for k, m in ((4, False), (6, True)) for d in (torch.bfloat16, torch.float32)]
    return [(Spec(kernel, d, k, m), c) for c in (80, 100) for kernel in ("forward", "backward") for k, m, d in key]


if __name__ == "__main__":
    from benchmarks import triton_tables

    if "--readme" in sys.argv:
        triton_tables.write_readme()
    else:
        print(triton_tables.compile_report())
