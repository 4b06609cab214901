"""Triton kernels in the interpreter beside compiled ones, in one process; and kernels compiled without a device."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

# The interpreter computes on special values with numpy.
INTERPRETER = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"),
]
MODULES = tuple(f"ppo_ops.kernels.triton{part}" for part in ("_tile", "_stats", "_entries", "_grad", ""))


def interpreted_kernels() -> ModuleType:
    """A copy of `ppo_ops.kernels.triton` whose kernels run in Triton's interpreter, on CPU tensors.

    `triton.jit` decides when it decorates, so the knob is set while the copy is imported and nowhere else. The copy
    does not stay in `sys.modules`: compiled kernels of the same process are untouched.
    """
    import triton

    import ppo_ops.kernels

    _mend_interpreter()
    saved = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    try:
        return importlib.import_module(MODULES[-1])
    finally:
        triton.knobs.runtime.interpret = before
        for name in MODULES:
            sys.modules.pop(name, None)
            vars(ppo_ops.kernels).pop(name.rpartition(".")[2], None)
        for name, module in saved.items():
            sys.modules[name] = module
            setattr(ppo_ops.kernels, name.rpartition(".")[2], module)


@functools.cache
def _mend_interpreter() -> None:
    """Repairs of Triton 3.8.0's interpreter, for which devices need none.

    It truncates float32 to bfloat16, where devices round to the nearest even. And each call of a jitted function by
    another one patches `triton.language` again, which is a third of the time of these tests.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert, patch = interpreter._convert_float, interpreter._patch_lang

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.array(data)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, rounding)

    def patch_lang(function: Any) -> Any:
        patched = not tl.core.is_builtin(tl.load)
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._convert_float = convert_float
    interpreter._patch_lang = patch_lang
