"""DTensor logits: which group shares the vocabulary, where a shard begins, and results that are DTensors again.

    logits  (placements, a mesh dimension each)   ->  results
    Shard(last dim), once                             Replicate
    Shard(batch dim)                                  Shard(batch dim)
    Replicate                                         Replicate

Nothing is communicated beyond what the plain functions do on the local tensors: the gather runs over the group of the
mesh dimension that shards the vocabulary, and not at all where none does.

Note [Chunks without a rank]
    DTensor cuts like `torch.chunk`: of V columns each rank holds ceil(V / W), but for one that holds the rest and
    empty ones behind it. A full rank's first column is rank * width, which kernels work out when they run. The rest
    ends where the vocabulary ends, so it begins at V - width. Both follow from sizes that all ranks of the same width
    share, hence a graph never holds a rank's number (Note [No rank in a graph] in `ops/groups.py`).

Note [DTensors that torch does not compile]
    Under `torch.compile` three things fail with an error, with `logits.log_softmax(-1).mean()` as with this library:
    - Two compilations in one process whose meshes are equal but not one object, as two times `mesh["tp"]` (torch 2.13,
      2.14; "Node tangents_2 was invalid"). Slice a mesh once, or let the compiled function return plain tensors.
    - A sharded dimension that changes its size from call to call and is not always divisible ("invalid gradient").
      Rows may change where they divide, or are not sharded.
    - `fullgraph=True` around a call of a module that FSDP2 wraps: its hooks are not traced. Compile the loss, or that
      module itself, with the loss in its `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor; imports `torch.distributed.tensor`, so ask for subclasses of Tensor only."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


class Layout(NamedTuple):
    """How logits lie on their mesh, and what the plain functions need to know of it."""

    mesh: Any
    placements: tuple[Any, ...]  # of the logits
    rows: tuple[Any, ...]  # of tensors shaped like target: the logits' without the vocabulary
    shape: tuple[int, ...]  # of all rows
    local_rows: tuple[int, ...]  # of this rank's rows
    group_name: str  # "" where every rank holds the whole vocabulary
    vocab_size: int
    vocab_start: int | None


def layout_of(logits: Any, local: Tensor, group: Any, vocab_size: int | None, vocab_start: int | None) -> Layout:
    """Read placements and sizes of logits whose part on this rank is `local`.

    Raises:
        ValueError: placements other than those of the module's table; `group` or `vocab_start` given; `vocab_size`
            beyond the logits' columns; local columns that are not those of `torch.chunk`.
    """
    from torch.distributed.tensor import Replicate, Shard

    if group is not None:
        raise ValueError("group must be None for DTensor logits, whose mesh says which ranks share the vocabulary")
    if vocab_start is not None:
        raise ValueError(f"vocab_start must be None for DTensor logits, whose placements say it; got {vocab_start}")
    if logits.dim() < 1:
        raise ValueError("logits must have the shape [..., V], got a 0-dim DTensor")
    placements, mesh, last = tuple(logits.placements), logits.device_mesh, logits.dim() - 1
    sharding = [d for d, p in enumerate(placements) if isinstance(p, Shard) and p.dim in (last, -1)]
    plain = all(isinstance(p, (Shard, Replicate)) for p in placements)
    if not plain or len(sharding) > 1:
        raise ValueError(
            f"logits must be a DTensor with the placements Shard({last}) on at most one mesh dimension, and "
            f"Shard(batch dim) or Replicate() on the others; got {placements}: redistribute it first"
        )
    rows = tuple(Replicate() if d in sharding else p for d, p in enumerate(placements))
    columns, width = logits.shape[-1], local.shape[-1]
    if vocab_size is not None and vocab_size > columns:
        raise ValueError(f"vocab_size must be at most the {columns} columns of the DTensor logits, got {vocab_size}")
    start, group_name = None, ""
    if sharding:
        size = mesh.size(sharding[0])
        group_name = mesh.get_group(sharding[0]).group_name
        if columns % size:
            start = _uneven_start(columns, width, size)
        elif width * size != columns:
            raise ValueError(
                f"logits of {columns} columns on {size} ranks must have {columns // size} here, got {width}"
            )
    shapes = (tuple(logits.shape[:-1]), tuple(local.shape[:-1]))
    return Layout(mesh, placements, rows, *shapes, group_name, columns if vocab_size is None else vocab_size, start)


def _uneven_start(columns: int, width: int, size: int) -> int | None:
    """First column of an uneven shard, None for a full one (Note [Chunks without a rank])."""
    full = -(-columns // size)
    if width == full:
        return None
    if width not in (columns % full, 0):
        raise ValueError(
            f"logits of {columns} columns on {size} ranks must have {full}, {columns % full} or 0 here, as "
            f"torch.chunk cuts them, got {width}; DTensor.from_local needs shape= for uneven shards"
        )
    return columns - width


def _to_local(name: str, value: Any, placements: tuple[Any, ...], layout: Layout) -> Tensor:
    if value.device_mesh != layout.mesh:
        raise ValueError(f"{name} must be on the mesh of logits, {layout.mesh}, got {value.device_mesh}")
    if tuple(value.placements) != placements:
        raise ValueError(
            f"{name} must have the placements {placements} to match logits with {layout.placements}, got "
            f"{tuple(value.placements)}"
        )
    return value.to_local()  # type: ignore[no-any-return]


def _local(name: str, value: Any, placements: tuple[Any, ...], shape: tuple[int, ...], layout: Layout) -> Any:
    """This rank's part of an argument; a plain tensor is that part already and must have its `shape`."""
    if not isinstance(value, Tensor):
        return value
    if is_dtensor(value):
        return _to_local(name, value, placements, layout)
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{name} as a plain tensor must be this rank's part, of shape {shape}, for DTensor logits with placements "
            f"{layout.placements}, got {tuple(value.shape)}; or pass a DTensor"
        )
    return value


def _local_temperature(temperature: Any, layout: Layout) -> Any:
    from torch.distributed.tensor import Replicate

    if isinstance(temperature, Tensor) and temperature.dim() == 0:
        everywhere = tuple(Replicate() for _ in layout.placements)
        return _local("temperature", temperature, everywhere, (), layout)
    return _local("temperature", temperature, layout.rows, layout.local_rows, layout)


def _local_set(name: str, value: Any, layout: Layout) -> Any:
    """Ragged rows: plain ones are this rank's, a DTensor must be replicated, as must be the rows."""
    if value is None or not is_dtensor(value):
        return value
    if any(placement.is_shard() for placement in layout.rows):
        raise ValueError(
            f"{name} must be a plain tensor of this rank's rows where the batch is sharded, as by {layout.placements}, "
            f"because ragged rows cannot be cut; got a DTensor"
        )
    return _to_local(name, value, layout.rows, layout)


def _from_local(value: Tensor, layout: Layout, *more: int) -> Any:
    """A result of this rank's rows (and `more` dimensions) as a DTensor."""
    from torch.distributed.tensor import DTensor

    shape = (*layout.shape, *more)
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step = step * size
    stride.reverse()
    where = {"shape": shape, "stride": tuple(stride)}
    return DTensor.from_local(value, layout.mesh, layout.rows, run_check=False, **where)  # type: ignore[arg-type]


def logprobs(function: Callable[..., Any], logits: Any, target: Any, keep_mask: Any, options: dict[str, Any]) -> Any:
    """Call `logprob` or `logprob_entropy` on this rank's part; their results as DTensors."""
    if options.pop("inplace_backward"):
        raise ValueError(
            "inplace_backward must be False for DTensor logits: autograd could not tell that their memory was "
            "overwritten; got True"
        )
    local = logits.to_local(grad_placements=logits.placements)
    layout = layout_of(logits, local, *(options.pop(name) for name in ("group", "vocab_size", "vocab_start")))
    more = tuple(target.shape[-1:]) if target.dim() == logits.dim() else ()
    arguments = (
        local,
        _local("target", target, layout.rows, (*layout.local_rows, *more), layout),
        _local("keep_mask", keep_mask, layout.placements, tuple(local.shape), layout),
    )
    options["temperature"] = _local_temperature(options["temperature"], layout)
    for name in ("keep_ids", "keep_offsets"):
        options[name] = _local_set(name, options[name], layout)
    where = {"vocab_size": layout.vocab_size, "vocab_start": layout.vocab_start, "group": layout.group_name or None}
    results = function(*arguments, **options, **where)
    if isinstance(results, tuple):
        return tuple(_from_local(result, layout, *more) for result in results)
    return _from_local(results, layout, *more)


def rows(function: Callable[..., Any], logits: Any, options: dict[str, Any], *more: int) -> Any:
    """Call a function without a target on this rank's part; its results, of rows and `more`, as DTensors."""
    local = logits.to_local(grad_placements=logits.placements)
    layout = layout_of(logits, local, *(options.pop(name) for name in ("group", "vocab_size", "vocab_start")))
    options["temperature"] = _local_temperature(options["temperature"], layout)
    where = {"vocab_size": layout.vocab_size, "vocab_start": layout.vocab_start, "group": layout.group_name or None}
    results = function(local, **options, **where)
    if isinstance(results, tuple):
        return tuple(_from_local(result, layout, *more) for result in results)
    return _from_local(results, layout, *more)
