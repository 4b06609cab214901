"""What Inductor receives: the forward and backward graphs, caught at `compile_fx`'s inner compiler, caches off."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpu_vec_isa import pick_vec_isa


@contextlib.contextmanager
def compile_cache(folder: str) -> Iterator[None]:
    """Compiled graphs and code are kept in `folder`.

    What the machine's vector instructions are stays where Inductor keeps it: it takes ten seconds to find out.
    """
    pick_vec_isa()
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        yield


class InductorGraphs:
    """A backend that compiles with Inductor and keeps each graph it was given."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(gm, inputs, inner_compile=self._inner)

    def _inner(self, gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        (self.backward if kwargs.get("is_backward") else self.forward).append(gm)
        with torch._inductor.config.patch(fx_graph_cache=False):
            return compile_fx_inner(gm, inputs, **kwargs)


class TracedGraphs(InductorGraphs):
    """As `InductorGraphs`, but runs the graphs without generating code: the same graphs, ten times as fast."""

    def _inner(self, gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        (self.backward if kwargs.get("is_backward") else self.forward).append(gm)
        return gm.forward


def operators(gm: torch.fx.GraphModule) -> Counter[str]:
    """How often each operator stands in a graph."""
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def operator_names(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
