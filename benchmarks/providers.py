"""This library, plain torch and its peers, each behind one signature ``(logits, inputs) -> (log_prob, entropy)``.

Peers are imported from the packages that are installed, never copied; one that cannot be imported is reported as
absent with the reason. What a provider cannot do (entropy, a kept set, ignored rows) it is not asked for.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import ppo_ops
from benchmarks.inputs import Cell, Inputs
from ppo_ops.kernels import aten, cpu, native

Outputs = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Deviation:
    """Known inexactness: larger tolerances of the gate for some dtypes, with the reason that marks the numbers."""

    outputs: float = 0.0
    gradient: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Provider:
    """A way to compute log-probabilities and entropies."""

    name: str
    function: Callable[[Tensor, Inputs], Outputs]
    package: str = "torch"
    entropy: bool = True
    kept: bool = False
    ignored: bool = False
    parallel: bool = False
    only_grad: bool = False
    only_kept: bool = False
    bytes_per_element: int = 20  # as the memory table shows; a cell that would not fit is skipped
    deviations: tuple[tuple[torch.dtype, Deviation], ...] = ()
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def ours(self) -> bool:
        return self.package == "ppo-ops"

    def can(self, cell: Cell, world: int = 1) -> bool:
        """Whether the provider computes what the cell asks for."""
        return (
            (self.entropy or not cell.entropy)
            and (self.kept or not cell.kept)
            and (self.ignored or not cell.ignored)
            and (self.parallel or world == 1)
            and (cell.grad or not self.only_grad)
            and (cell.kept or not self.only_kept)
        )

    def deviation(self, dtype: torch.dtype) -> Deviation:
        return dict(self.deviations).get(dtype, Deviation())


def _group(inputs: Inputs) -> Any:
    return dist.group.WORLD if inputs.world > 1 else None


def _ours(logits: Tensor, inputs: Inputs, inplace: bool = False) -> Outputs:
    arguments = (logits, inputs.target, inputs.keep_mask)
    if inputs.cell.entropy:
        return ppo_ops.logprob_entropy(*arguments, inplace_backward=inplace, group=_group(inputs))
    return ppo_ops.logprob(*arguments, inplace_backward=inplace, group=_group(inputs)), None


def _ours_ragged(logits: Tensor, inputs: Inputs) -> Outputs:
    kept = {"keep_ids": inputs.keep_ids, "keep_offsets": inputs.keep_offsets, "group": _group(inputs)}
    if inputs.cell.entropy:
        return ppo_ops.logprob_entropy(logits, inputs.target, **kept)
    return ppo_ops.logprob(logits, inputs.target, **kept), None


def _ours_inplace(logits: Tensor, inputs: Inputs) -> Outputs:
    return _ours(logits, inputs, inplace=True)


@contextmanager
def _aten_kernels() -> Iterator[None]:
    before = cpu._kernels
    cpu._kernels = lambda dtype: aten
    try:
        yield
    finally:
        cpu._kernels = before


def ppo_ops_providers(device: str) -> list[Provider]:
    """This library: its best kernels, the same with the gradient in place, and its ATen kernels."""
    can = {"package": "ppo-ops", "kept": True, "ignored": True, "parallel": True}
    if device.startswith("cuda"):
        names = [("ppo_ops", nullcontext)]
    else:
        names = [("ppo_ops (ATen)", _aten_kernels)]
        if native.available():
            names.insert(0, ("ppo_ops", nullcontext))
    providers = []
    for name, context in names:
        providers.append(Provider(name, _ours, context=context, bytes_per_element=5, **can))  # type: ignore[arg-type]
        if context is nullcontext:
            options = {**can, "only_grad": True, "bytes_per_element": 1}
            providers.append(Provider(f"{name}, in place", _ours_inplace, **options))  # type: ignore[arg-type]
            options = {**can, "only_kept": True, "bytes_per_element": 5}
            providers.append(Provider(f"{name}, kept as ids", _ours_ragged, **options))  # type: ignore[arg-type]
    return providers


def plain(
    logits: Tensor, target: Tensor, keep_mask: Tensor | None, ignored: Tensor | None, with_entropy: bool
) -> Outputs:
    """The usual unfused sequence, in float32."""
    x = logits.float()
    index = (target if ignored is None else target.clamp(min=0)).unsqueeze(-1)
    log_p = F.log_softmax(x, -1) if keep_mask is None or with_entropy else None
    log_kept = log_p
    if keep_mask is not None:
        log_kept = F.log_softmax(x.masked_fill(~keep_mask.scatter(-1, index, True), -torch.inf), -1)
    assert log_kept is not None
    log_prob = log_kept.gather(-1, index).squeeze(-1)
    entropy = None
    if with_entropy:
        assert log_p is not None
        entropy = -(log_p.exp() * log_p).sum(-1)
    if ignored is not None:
        log_prob = log_prob.masked_fill(ignored, 0.0)
        entropy = None if entropy is None else entropy.masked_fill(ignored, 0.0)
    return log_prob, entropy


def torch_providers(device: str) -> list[Provider]:
    """Plain torch: eager, compiled, and the built-in cross entropy."""
    compiled = torch.compile(plain)

    def arguments(inputs: Inputs) -> tuple[Any, ...]:
        return inputs.target, inputs.keep_mask, inputs.ignored, inputs.cell.entropy

    def cross_entropy(logits: Tensor, inputs: Inputs) -> Outputs:
        return -F.cross_entropy(logits.float(), inputs.target, reduction="none"), None

    return [
        Provider("torch eager", lambda logits, inputs: plain(logits, *arguments(inputs)), kept=True, ignored=True),
        Provider("torch.compile", lambda logits, inputs: compiled(logits, *arguments(inputs)), kept=True, ignored=True),
        Provider("F.cross_entropy", cross_entropy, entropy=False, ignored=True),
    ]


def megatron_providers(device: str) -> list[Provider]:
    """megatron-core's vocab-parallel cross entropies, fused and not."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    start_group(device=device)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())
    group = parallel_state.get_tensor_model_parallel_group()

    def fused(logits: Tensor, inputs: Inputs) -> Outputs:
        return -fused_vocab_parallel_cross_entropy(logits, inputs.target, group), None

    def unfused(logits: Tensor, inputs: Inputs) -> Outputs:
        return -vocab_parallel_cross_entropy(logits, inputs.target), None

    rounded = Deviation(gradient=5e-3, reason="gradient always rounded to bfloat16")
    can = {"package": "megatron-core", "entropy": False, "parallel": True}
    return [
        Provider("megatron fused", fused, deviations=((torch.float32, rounded),), **can),  # type: ignore[arg-type]
        Provider("megatron unfused", unfused, **can),  # type: ignore[arg-type]
    ]


def trl_providers(device: str) -> list[Provider]:
    """TRL's selective_log_softmax and entropy_from_logits."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def function(logits: Tensor, inputs: Inputs) -> Outputs:
        entropy = entropy_from_logits(logits) if inputs.cell.entropy else None
        return selective_log_softmax(logits, inputs.target), entropy

    low = Deviation(outputs=2e-2, gradient=5e-2, reason="computes bfloat16 logits in bfloat16")
    return [Provider("trl", function, package="trl", deviations=((torch.bfloat16, low),))]


def verl_providers(device: str) -> list[Provider]:
    """verl's functions of its Megatron backend (vocab-parallel) and of its FSDP backend."""
    megatron_providers(device)  # verl asks megatron-core for the group
    from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    def vocab_parallel(logits: Tensor, inputs: Inputs) -> Outputs:
        if not inputs.cell.entropy:
            return vocab_parallel_log_probs_from_logits(logits, inputs.target), None
        # verl's engine clones too: the cross entropy overwrites its argument, which the entropy saved.
        log_prob = vocab_parallel_log_probs_from_logits(logits.clone(), inputs.target)
        return log_prob, vocab_parallel_entropy(logits)

    def fsdp(logits: Tensor, inputs: Inputs) -> Outputs:
        entropy = entropy_from_logits(logits) if inputs.cell.entropy else None
        return logprobs_from_logits(logits, inputs.target, inplace_backward=False), entropy

    low = ((torch.bfloat16, Deviation(outputs=5e-2, gradient=5e-2, reason="entropy of bfloat16 logits in bfloat16")),)
    return [
        Provider("verl vocab-parallel", vocab_parallel, "verl", parallel=True, deviations=low, bytes_per_element=12),
        Provider("verl fsdp", fsdp, "verl", deviations=low, bytes_per_element=24),
    ]


LOADERS = {
    "ppo-ops": ppo_ops_providers,
    "torch": torch_providers,
    "megatron-core": megatron_providers,
    "trl": trl_providers,
    "verl": verl_providers,
}


def start_group(rank: int = 0, world: int = 1, store: dist.Store | None = None, device: str = "cpu") -> None:
    """Initialise torch.distributed once; peers need a group even for one process."""
    if not dist.is_initialized():
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=store or dist.HashStore(), rank=rank, world_size=world)


def load(device: str, only: list[str] | None = None) -> tuple[list[Provider], dict[str, str], dict[str, str]]:
    """All providers that can be had, versions by package, and reasons of absence by package."""
    providers, versions, absent = [], {}, {}
    torch._dynamo.config.recompile_limit = 64  # torch.compile sees many shapes, dtypes and options in one process
    for package, loader in LOADERS.items():
        if only is not None and package not in only:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = loader(device)
        except Exception as error:
            absent[package] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            continue
        providers += found
        versions[package] = _version(package)
    if not device.startswith("cuda") and not native.available():
        absent["ppo_ops native kernels"] = native.why_unavailable()
    return providers, versions, absent


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source tree"
