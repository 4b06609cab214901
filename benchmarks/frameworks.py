"""A framework's own functions before and after `ppo_ops.integrations.patch`: memory, time, collectives, error.

    python -m benchmarks.frameworks verl trl megatron areal
    python -m benchmarks.frameworks verl --rows 64 --vocab 1000 --rounds 3    quickly, to see that it runs

The same calls as the framework's engines make, resolved by name at each call, so that they are the framework's before
and this library's after. Memory comes from a fresh process each; times are medians of interleaved rounds in one
process; collectives are counted by the profiler on two gloo ranks; errors are those of values against float64. Prints
markdown.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.inputs import Cell, Inputs
from benchmarks.memory import _Meter
from benchmarks.providers import Outputs, start_group
from ppo_ops import reference
from ppo_ops.integrations import patch

TIMEOUT_S = 600
COUNTED = (8, 1000)  # rows and vocabulary of the two ranks whose collectives are counted


class Route(NamedTuple):
    """What an engine of a framework calls; `module` is looked into at each call."""

    framework: str
    package: str
    module: str
    function: Callable[[Any, Tensor, Inputs], Outputs]
    parallel: bool = False
    entropy: bool = True


def _verl_parallel(module: Any, logits: Tensor, inputs: Inputs) -> Outputs:
    # verl's engine clones: its cross entropy overwrites the logits, which its entropy has saved.
    log_prob = module.vocab_parallel_log_probs_from_logits(logits.clone(), inputs.target)
    return log_prob, module.vocab_parallel_entropy(logits)


def _verl_fsdp(module: Any, logits: Tensor, inputs: Inputs) -> Outputs:
    entropy = module.entropy_from_logits(logits)
    return module.logprobs_from_logits(logits, inputs.target, inplace_backward=False), entropy


def _verl_fsdp_log_prob(module: Any, logits: Tensor, inputs: Inputs) -> Outputs:
    return module.logprobs_from_logits(logits, inputs.target), None


def _trl(module: Any, logits: Tensor, inputs: Inputs) -> Outputs:
    return module.selective_log_softmax_and_entropy(logits, inputs.target)  # type: ignore[no-any-return]


def _areal(module: Any, logits: Tensor, inputs: Inputs) -> Outputs:
    # AReaL's engines pass a group where it has more than one rank.
    group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    return module.gather_logprobs_entropy(logits, inputs.target, tp_group=group)  # type: ignore[no-any-return]


def _megatron(module: Any, logits: Tensor, inputs: Inputs) -> Outputs:
    return -module.vocab_parallel_cross_entropy(logits, inputs.target), None


def _megatron_fused(module: Any, logits: Tensor, inputs: Inputs) -> Outputs:
    return -module.fused_vocab_parallel_cross_entropy(logits, inputs.target, dist.group.WORLD), None


_VERL = ("verl", "verl")
_MEGATRON = ("megatron", "megatron-core")
ROUTES = {
    "verl Megatron engine": Route(*_VERL, "verl.utils.megatron.tensor_parallel", _verl_parallel, parallel=True),
    "verl FSDP engine": Route(*_VERL, "verl.utils.torch_functional", _verl_fsdp),
    "verl FSDP engine, log-prob": Route(*_VERL, "verl.utils.torch_functional", _verl_fsdp_log_prob, entropy=False),
    "trl, both": Route("trl", "trl", "trl.trainer.utils", _trl),
    "areal, both": Route("areal", "areal", "areal.utils.functional.vocab_parallel", _areal, parallel=True),
    "megatron-core": Route(
        *_MEGATRON, "megatron.core.tensor_parallel.cross_entropy", _megatron, parallel=True, entropy=False
    ),
    "megatron-core, fused": Route(
        *_MEGATRON, "megatron.core.fusions.fused_cross_entropy", _megatron_fused, parallel=True, entropy=False
    ),
}


def _patched(route: Route, on: bool) -> AbstractContextManager[Any]:
    return patch(route.framework) if on else nullcontext()


def _prepare(route: Route, rank: int = 0, world: int = 1, store: dist.Store | None = None) -> Any:
    """The route's module, with process groups for those that ask for one."""
    warnings.simplefilter("ignore")
    if route.parallel:
        from megatron.core import parallel_state

        start_group(rank, world, store)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(world)
    return importlib.import_module(route.module)


def _step(route: Route, module: Any, inputs: Inputs) -> tuple[float, float, Outputs]:
    inputs.restore()
    start = time.perf_counter()
    outputs = route.function(module, inputs.logits(), inputs)
    middle = time.perf_counter()
    inputs.backward(outputs)
    return middle - start, time.perf_counter() - middle, outputs


def _memory(name: str, on: bool, rows: int, vocab: int, dtype: str) -> dict[str, float]:
    """Peaks beyond the logits, in units of them; this must be a fresh process."""
    route = ROUTES[name]
    module = _prepare(route)
    with _patched(route, on):
        small = Inputs(Cell(max(2, rows // 10), vocab, getattr(torch, dtype), entropy=route.entropy))
        _step(route, module, small)  # loads code, starts threads, compiles
        inputs = Inputs(Cell(rows, vocab, getattr(torch, dtype), entropy=route.entropy))
        inputs.restore()
        meter, size = _Meter("cpu"), inputs.work.nbytes
        base = meter.now()
        meter.reset()
        outputs = route.function(module, inputs.logits(), inputs)
        found = {"forward": (meter.peak() - base) / size, "held": (meter.now() - base) / size}
        meter.reset()
        inputs.backward(outputs)
        return {**found, "backward": (meter.peak() - base) / size}


def _fresh(*arguments: Any) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.frameworks", "--worker", json.dumps(arguments)]
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _times_and_errors(name: str, rows: int, vocab: int, dtype: str, rounds: int) -> list[dict[str, float]]:
    """Before and after: median seconds, and the largest errors of the values."""
    route = ROUTES[name]
    module, inputs = _prepare(route), Inputs(Cell(rows, vocab, getattr(torch, dtype), entropy=route.entropy))
    checked = slice(0, 64)
    right = reference.logprob_entropy(inputs.full[checked], inputs.target[checked])
    times: list[list[tuple[float, float]]] = [[], []]
    found: list[dict[str, float]] = [{}, {}]
    for turn in range(rounds + 1):
        for on in (False, True) if turn % 2 else (True, False):
            with _patched(route, on):
                forward, backward, outputs = _step(route, module, inputs)
            if turn:  # the first round loads code, starts threads and compiles
                times[on].append((forward, backward))
                continue
            for key, value, truth in zip(("log-prob", "entropy"), outputs, right, strict=True):
                if value is not None:
                    found[on][key] = float((value.detach()[checked].double() - truth).abs().max())
            del outputs
    for on in (False, True):
        found[on]["forward s"], found[on]["backward s"] = (median(step) for step in zip(*times[on], strict=True))
    return found


def _count(rank: int, name: str, folder: str) -> None:
    """On two ranks: collectives forward and backward, before and after, written by rank 0."""
    torch.set_num_threads(1)
    route, counts = ROUTES[name], []
    module = _prepare(route, rank, 2, dist.FileStore(f"{folder}/store", 2))
    inputs = Inputs(Cell(*COUNTED, torch.float32, entropy=route.entropy), rank, 2)
    for on in (False, True):
        with _patched(route, on), torch.compiler.set_stance("force_eager"):
            inputs.restore()
            with torch.profiler.profile() as forward:
                outputs = route.function(module, inputs.logits(), inputs)
            with torch.profiler.profile() as backward:
                inputs.backward(outputs)
        counts.append([sum(e.name.startswith("gloo:") for e in p.events() or []) for p in (forward, backward)])
    if rank == 0:
        Path(folder, "counts").write_text(json.dumps(counts))
    dist.barrier()
    dist.destroy_process_group()


def collectives(name: str) -> list[list[int]]:
    """``[[forward, backward] before, [forward, backward] after]``; nothing is counted where one rank holds all."""
    if not ROUTES[name].parallel:
        return [[0, 0], [0, 0]]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_count, (name, folder), 2, start_method="spawn")
        counts: list[list[int]] = json.loads(Path(folder, "counts").read_text())
    return counts


def table(names: list[str], rows: int, vocab: int, rounds: int) -> str:
    """Markdown, a row before and a row after for each route and dtype."""
    head = "| | dtype | memory: forward / held / backward | seconds: forward / backward | error: log-prob / entropy |"
    lines = [f"{head} collectives |", "|---|---|---|---|---|---|"]
    for name in names:
        counted = collectives(name)
        for dtype in ("float32", "bfloat16"):
            measured = _times_and_errors(name, rows, vocab, dtype, rounds)
            for on in (False, True):
                memory = _fresh(name, on, rows, vocab, dtype)
                peaks = " / ".join(f"{max(memory[key], 0.0):.2f}" for key in ("forward", "held", "backward"))
                seconds = " / ".join(f"{measured[on][key]:.3f}" for key in ("forward s", "backward s"))
                errors = " / ".join(f"{measured[on][key]:.1e}" if key in measured[on] else "-" for key in ERRORS)
                label = f"{name}{', patched' if on else ''}"
                lines.append(
                    f"| {label} | {dtype} | {peaks} | {seconds} | {errors} | {counted[on][0]}, {counted[on][1]} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


ERRORS = ("log-prob", "entropy")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks", description=__doc__.splitlines()[0])
    frameworks = sorted({route.framework for route in ROUTES.values()})
    parser.add_argument("framework", nargs="*", help=f"of: {', '.join(frameworks)}")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        print(json.dumps(_memory(*json.loads(options.worker))))
        return 0
    names = [name for name, route in ROUTES.items() if route.framework in options.framework]
    if not names or set(options.framework) - set(frameworks):
        parser.error(f"name frameworks, of: {', '.join(frameworks)}")
    packages = ["torch", *dict.fromkeys(ROUTES[name].package for name in names)]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    print(table(names, options.rows, options.vocab, options.rounds))
    print(f"\n{options.rows} x {options.vocab}, {torch.get_num_threads()} threads, {versions}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
