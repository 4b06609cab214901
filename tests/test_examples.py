"""The examples, nearly all in processes of their own: they pass, and they exit non-zero where a result is wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.multiprocessing as mp

import ppo_ops
from ppo_ops import reference

EXAMPLES = Path(__file__).parents[1] / "examples"
# The slowest, 03 where nothing was compiled before, takes half a minute on two cores.
TIME_LIMIT = 240.0


def run(script: str, folder: Path, *arguments: str, preamble: str = "") -> tuple[int, str]:
    """Exit status and all output of an example on the package under test. Graphs are compiled anew.

    Headers, and code that is the same to the letter, are taken from where Inductor keeps them: a third of the time.

    Args:
        script: file name.
        folder: an empty one.
        arguments: of the example.
        preamble: code that runs first, in the example's process and in those that it starts.
    """
    (folder / "sitecustomize.py").write_text(preamble)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(ppo_ops.__file__).parents[1])]),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
    return process.returncode, output


def test_single_device(tmp_path: Path) -> None:
    status, output = run("01_single_device.py", tmp_path)
    assert status == 0, output
    assert re.search(r"^perplexity [\d.]+; from the frequencies of single bytes [\d.]+$", output, re.MULTILINE), output
    assert output.endswith("OK\n"), output


def loaded(script: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def single_device(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Example 01 as a module that hardly trains."""
    module = loaded("01_single_device.py")
    monkeypatch.setattr(module, "STEPS", 4)
    return module


def test_single_device_notices_a_model_that_learned_nothing(single_device: ModuleType) -> None:
    assert single_device.main() == 1


@pytest.mark.parametrize(("shift", "status"), [(0.0, 0), (2e-5, 1)])
def test_single_device_notices_a_wrong_number(
    single_device: ModuleType, monkeypatch: pytest.MonkeyPatch, shift: float, status: int
) -> None:
    """The shift is twice the example's tolerance. Unlikely bytes let the untrained model pass."""
    original = reference.logprob_entropy

    def shifted(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_prob, entropy = original(*args)
        return log_prob, entropy + shift

    monkeypatch.setattr(single_device, "frequencies", lambda corpus: torch.full((256,), 1e-6))
    monkeypatch.setattr(reference, "logprob_entropy", shifted)
    assert single_device.main() == status


def test_vocab_parallel(tmp_path: Path) -> None:
    status, output = run("02_vocab_parallel.py", tmp_path)
    assert status == 0, output
    for name in ("log_prob", "entropy"):
        first, second = re.findall(rf"^  {name} .*$", output, re.MULTILINE)
        assert first == second
    assert output.count("the same bits on both ranks: yes") == 2, output
    assert output.endswith("OK: both ranks have the same bits, and each gradient slice equals that of one process\n")


ONE_BIT_OFF = """
import ppo_ops, torch.distributed
original = ppo_ops.logprob_entropy
def one_bit_off(*args, group, **options):
    log_prob, entropy = original(*args, group=group, **options)
    on_rank_1 = group is not None and torch.distributed.get_rank() == 1
    return log_prob * (1 + 2.0**-23) if on_rank_1 else log_prob, entropy
ppo_ops.logprob_entropy = one_bit_off
"""


def test_vocab_parallel_notices_one_bit(tmp_path: Path) -> None:
    status, output = run("02_vocab_parallel.py", tmp_path, preamble=ONE_BIT_OFF)
    assert status == 1, output
    assert output.count("the same bits on both ranks: NO") == 2, output


def test_compiled_ppo_loss(tmp_path: Path) -> None:
    status, output = run("03_compiled_ppo_loss.py", tmp_path)
    assert status == 0, output
    assert output.count("collectives in forward:  1 _c10d_functional::all_gather_into_tensor\n") == 2, output
    assert output.count("collectives in backward: 0\n") == 2, output
    assert output.count("call_function[target=torch.ops.ppo.logprob_entropy.default]") == 2, output
    assert output.endswith("OK: one compiled graph, one collective\n"), output


def _spawn_here(function: Callable[..., None], args: tuple[object, ...], nprocs: int) -> None:
    """In place of processes of their own: runs the only rank, and reports its exit as they do."""
    assert nprocs == 1
    try:
        function(0, *args)
    except SystemExit as error:
        raise mp.ProcessExitedException("rank 0", 0, 0, int(str(error.code))) from None


def test_ppo_loss_on_one_rank_notices_a_wrong_sign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a compiler and in this process, to save time: what is checked here are the example's comparisons."""
    example, original, threads = loaded("03_compiled_ppo_loss.py"), ppo_ops.logprob_entropy, torch.get_num_threads()

    def entropy_negated(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        log_prob, entropy = original(*args, **options)
        return log_prob, -entropy

    monkeypatch.setattr(torch, "compile", lambda module, fullgraph: module)
    monkeypatch.setattr(mp, "spawn", _spawn_here)
    monkeypatch.setattr(sys, "argv", ["03_compiled_ppo_loss.py", "--ranks", "1"])
    monkeypatch.setenv("KINETO_LOG_LEVEL", "9")
    try:
        assert example.main() == 0
        right = capsys.readouterr().out
        monkeypatch.setattr(ppo_ops, "logprob_entropy", entropy_negated)
        assert example.main() == 1
    finally:
        torch.set_num_threads(threads)
    assert right.endswith("OK: one compiled graph, no collective\n")
    wrong = capsys.readouterr().out
    # The mistake moves the loss by twice the bonus, 2 * 0.01 * 7 nats; everything else is right.
    (difference,) = re.findall(r"difference (\S+) ", wrong)
    assert 0.1 < float(difference) < 0.2, wrong
    assert wrong.count("collectives in forward:  0\n") == 1, wrong
    assert wrong.count("call_function[target=torch.ops.ppo.logprob_entropy.default]") == 1, wrong
