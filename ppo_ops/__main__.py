"""``python -m ppo_ops``: versions, which kernels are active, a self-check, and a line for each thing that is missing.

Exits with 0 if the self-check passed, whatever is missing, else with 1.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import ppo_ops
from ppo_ops import self_check
from ppo_ops.kernels import cpu, native

FRAMEWORKS = {"verl": "verl", "trl": "trl", "megatron-core": "megatron"}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions() -> list[tuple[str, str]]:
    lines = [
        ("ppo_ops", f"{ppo_ops.__version__} in {Path(ppo_ops.__file__).parent}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("triton", _version("triton") or "not installed"),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]
    if dist.is_available():
        there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        lines.append(("distributed", " ".join(name for name, is_there in there.items() if is_there) or "no backend"))
    return lines


def _kernels() -> list[tuple[str, str]]:
    """What serves each dtype: asked of the code that decides it."""
    names: dict[str, list[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            name = f"native, {native.instruction_set()}" if cpu._kernels(dtype) is native else "ATen"
            names.setdefault(name, []).append(str(dtype).removeprefix("torch."))
    lines = [(f"cpu {', '.join(dtypes)}", name) for name, dtypes in names.items()]
    if torch.cuda.is_available() and importlib.util.find_spec("triton"):
        lines.append(("cuda", f"Triton, {torch.cuda.get_device_name()}"))
    else:
        lines.append(("cuda", "none"))
    return lines


def missing() -> list[str]:
    """One line for each thing that is not there: what it costs, and how to get it."""
    lines = []
    if not native.available():
        lines.append(
            f"native CPU kernels: {native.why_unavailable()}. The CPU runs the ATen kernels, several times slower, "
            "with the same results within rounding. To have them: a C compiler, then ppo_ops installed again; "
            "PPO_OPS_NATIVE unset"
        )
    if not torch.cuda.is_available():
        lines.append("CUDA: torch finds no device. CPU tensors are served all the same")
    if not importlib.util.find_spec("triton"):
        lines.append("triton: CUDA tensors need it, CPU tensors do not. pip install triton")
    if not dist.is_available():
        lines.append("torch.distributed: this torch was built without it. A `group` cannot be given")
    absent = [package for package, module in FRAMEWORKS.items() if not importlib.util.find_spec(module)]
    if absent:
        lines.append(f"{', '.join(absent)}: only ppo_ops.integrations.patch and their tests need them")
    return lines


def _print_pairs(title: str, pairs: list[tuple[str, str]]) -> None:
    print(title)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"  {name:{width}}  {value}")


def main() -> int:
    """Prints the report; the exit code."""
    _print_pairs("versions", _versions())
    _print_pairs("kernels", _kernels())
    begin = time.perf_counter()
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is missing is said below
        for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            for name, check in self_check.CHECKS.items():
                try:
                    check(device)
                    results.append((f"{name} ({device})", "ok"))
                except Exception as error:
                    if not isinstance(error, AssertionError):
                        traceback.print_exc()
                    text = " ".join(str(error).split())
                    results.append((f"{name} ({device})", f"FAILED: {type(error).__name__}: {text[:300]}"))
    passed = all(value == "ok" for _, value in results)
    _print_pairs(f"self-check, {time.perf_counter() - begin:.1f} s", results)
    for line in missing():
        print(f"missing  {line}")
    print("everything works" if passed else "the self-check FAILED: do not trust results of this installation")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
