"""The handed cases inside one graph that Inductor really compiles: values and gradients of both outputs."""

from __future__ import annotations

import torch
from torch import Tensor

import ppo_ops
from tests import cases
from tests.compiler.harness import InductorGraphs, operators

CALLS = [(case.target, case.keep_mask, case.options()) for case in cases.handed()]


def _outputs(logits: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [
        ppo_ops.logprob_entropy(x, target, keep_mask, **options)
        for x, (target, keep_mask, options) in zip(logits, CALLS, strict=True)
    ]
    return [log_prob for log_prob, _ in pairs], [entropy for _, entropy in pairs]


def test_handed_cases_compiled() -> None:
    torch._dynamo.reset()
    graphs = InductorGraphs()
    logits = [case.logits.clone().requires_grad_() for case in cases.handed()]
    # The upstream gradient arrives at run time, so one graph serves both outputs.
    compiled = torch.compile(_outputs, backend=graphs, fullgraph=True)
    for name, which in (("log_prob", 0), ("entropy", 1)):
        outputs = compiled(logits)
        total = sum(output.double().sum() for output in outputs[which])
        grads = torch.autograd.grad(total, logits)
        for case, output, grad in zip(cases.handed(), outputs[which], grads, strict=True):
            case.expected.check(name, output.detach())
            case.expected.check(f"grad_{name}", grad)
    assert len(graphs.forward) == len(graphs.backward) == 1
    assert operators(graphs.forward[0])["ppo._vocab_stats.default"] == len(logits)


def test_row_bits_do_not_depend_on_the_row_count_when_compiled() -> None:
    """Vectorised code and its scalar tail must agree: rows 0 to 40 of a batch against the same rows alone."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, t: ppo_ops.logprob_entropy(x, t, temperature=0.7), fullgraph=True, dynamic=True)
    case = cases.random_case("compiled_rows", 41, 129)
    whole = compiled(case.logits, case.target)
    for rows in (2, 7, 16, 33):
        for output, expected in zip(compiled(case.logits[:rows], case.target[:rows]), whole, strict=True):
            assert torch.equal(output, expected[:rows])
