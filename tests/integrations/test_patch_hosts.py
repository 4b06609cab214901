"""`patch` on NeMo-RL, AReaL and slime without them: on modules with their paths and their arguments.

What the replacements compute is tested beside the adapters; here they must be what computes it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_ops.integrations import _frameworks, _patch, patch
from tests.integrations import hosts
from tests.integrations.hosts import OWN

MAKE: dict[str, Callable[[], list[ModuleType]]] = {
    "nemo_rl": hosts.nemo_rl,
    "areal": hosts.areal,
    "areal without reuse_logits": lambda: hosts.areal(reuse_logits=False),
    "slime": hosts.slime,
}
# Where they are replaced: at home, where another module imported them, and under another name.
PLACES = {
    "nemo_rl": [
        "nemo_rl.distributed.model_utils.ChunkedDistributedEntropy",
        "nemo_rl.distributed.model_utils.ChunkedDistributedGatherLogprob",
        "nemo_rl.distributed.model_utils.ChunkedDistributedLogprob",
        "nemo_rl.distributed.model_utils.DistributedLogprob",
        "nemo_rl.user.Distributed",
        "nemo_rl.user.Entropy",
    ],
    "areal": [
        "areal.user.both",
        "areal.user.gather_logprobs",
        "areal.utils.functional.gather_logprobs",
        "areal.utils.functional.gather_logprobs_entropy",
        "areal.utils.functional.vocab_parallel.gather_logprobs",
        "areal.utils.functional.vocab_parallel.gather_logprobs_entropy",
    ],
    "slime": [
        "slime.backends.megatron_utils.loss.calculate_log_probs_and_entropy",
        "slime.backends.megatron_utils.loss.get_log_probs_and_entropy",
        "slime.user.get_log_probs_and_entropy",
        "slime.utils.ppo_utils.calculate_log_probs_and_entropy",
    ],
}
LOGITS, TARGET, LN4 = torch.zeros(1, 3, 4), torch.tensor([[0, 1, 3]]), -1.3862944


class Host:
    """A framework's modules among the loaded ones, of `version` (None: run from a checkout)."""

    def __init__(self, framework: str, modules: list[ModuleType]) -> None:
        self.framework, self.modules = framework, modules
        self.version: str | None = _frameworks.FRAMEWORKS[framework].versions[-1]
        self.before = [dict(vars(module)) for module in modules]

    def __getitem__(self, place: str) -> Any:
        module, name = place.rsplit(".", 1)
        return getattr(sys.modules[module], name)

    def is_untouched(self) -> bool:
        """The very same objects under the same names in the same order."""
        return all(
            list(vars(module).items()) == list(names.items())
            and all(vars(module)[name] is names[name] for name in names)
            for module, names in zip(self.modules, self.before, strict=True)
        )

    def metadata(self, name: str) -> str:
        if self.version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.version


@pytest.fixture
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    found = Host(request.param.split()[0], MAKE[request.param]())
    for module in found.modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", found.metadata)
    yield found
    assert _patch._active == {}


every_host = pytest.mark.parametrize("host", MAKE, indirect=True)
one_host = {name: pytest.mark.parametrize("host", [name], indirect=True) for name in MAKE}


@every_host
def test_replaces_every_reference_and_restores(host: Host) -> None:
    with patch(host.framework) as done:
        assert sorted(place for place in done.patched if place.startswith(host.framework)) == PLACES[host.framework]
        assert done.skipped == {}
        assert {host[place].__module__ for place in PLACES[host.framework]} == {
            f"ppo_ops.integrations.{host.framework}"
        }
        adapter = importlib.import_module(f"ppo_ops.integrations.{host.framework}")
        assert not [place for place in PLACES[host.framework] if host[place] in vars(adapter).values()]
    assert host.is_untouched()


def _close(found: Any, expected: float) -> None:
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, torch.full_like(found, expected))


@one_host["nemo_rl"]
def test_nemo_rl_computes_by_ppo_ops(host: Host) -> None:
    """The classes, in NeMo-RL's sign, and NeMo-RL's own functions through them."""
    home = "nemo_rl.distributed.model_utils"
    entropy = LOGITS, 128, None
    assert host["nemo_rl.user.Entropy"].apply(*entropy) == OWN
    with patch("nemo_rl"):
        _close(host["nemo_rl.user.Entropy"].apply(*entropy), LN4)
        _close(host["nemo_rl.user.Distributed"].apply(LOGITS, TARGET, 0, 4, None, True), LN4)
        _close(host[f"{home}.ChunkedDistributedLogprob"].apply(LOGITS, TARGET, 0, 4, 2, None), LN4)
        several = host[f"{home}.ChunkedDistributedGatherLogprob"].apply(LOGITS, TARGET.unsqueeze(-1), 0, 4, 2, None)
        assert several.shape == (1, 3, 1)
        _close(host[f"{home}.from_parallel_logits_to_logprobs"](LOGITS, TARGET, 0, 4, None), LN4)


@pytest.mark.parametrize("host", ["areal", "areal without reuse_logits"], indirect=True)
def test_areal_computes_by_ppo_ops(host: Host) -> None:
    assert host["areal.user.gather_logprobs"](LOGITS, TARGET) == OWN
    with patch("areal"):
        _close(host["areal.user.gather_logprobs"](LOGITS, TARGET, temperature=0.5, tp_group=None, chunk_size=2), LN4)
        log_prob, entropy = host["areal.user.both"](LOGITS, TARGET)
        _close(log_prob, LN4)
        _close(entropy, -LN4)


def _packed(host: Host, *, allgather_cp: bool = False, **more: Any) -> Any:
    """As slime calls it."""
    lengths = {"total_lengths": [3], "response_lengths": [2], "unconcat_tokens": [TARGET[0]]}
    args = SimpleNamespace(rollout_temperature=0.7, log_probs_chunk_size=-1, allgather_cp=allgather_cp)
    return host["slime.user.get_log_probs_and_entropy"](LOGITS, args=args, **lengths, with_entropy=True, **more)


@one_host["slime"]
def test_slime_computes_by_ppo_ops(host: Host) -> None:
    assert _packed(host) == OWN
    with patch("slime"):
        rows = host["slime.backends.megatron_utils.loss.calculate_log_probs_and_entropy"]
        log_prob, entropy = rows(LOGITS[0], TARGET[0], None, with_entropy=True, with_entropy_grad=False)
        assert log_prob.shape == (3, 1)
        _close(log_prob, LN4)
        _close(entropy, -LN4)
        found = _packed(host, tp_group="")[1]  # instead of Megatron's
        _close(found["log_probs"][0], LN4)
        _close(found["entropy"][0], -LN4)


@one_host["slime"]
def test_samples_that_context_parallelism_cuts_stay_with_slime(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own function then, which in slime calls the other replacement."""
    group = SimpleNamespace(size=lambda: 2)
    with patch("slime"):
        assert _packed(host, allgather_cp=True) == OWN
        assert isinstance(_packed(host, tp_group="")[1], dict)
        state = SimpleNamespace(get_context_parallel_group=lambda check_initialized: group)
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)  # type: ignore[arg-type]
        assert _packed(host) == OWN


@one_host["slime"]
def test_slime_without_megatron(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    home = "slime.backends.megatron_utils.loss"
    monkeypatch.setitem(sys.modules, home, None)
    with patch("slime") as done:
        assert list(done.skipped) == [home]
        assert done.patched == ("slime.utils.ppo_utils.calculate_log_probs_and_entropy",)
        assert _packed(host) == OWN


@every_host
def test_unknown_version(host: Host) -> None:
    host.version = "99.0"
    known = ", ".join(_frameworks.FRAMEWORKS[host.framework].versions)
    with pytest.raises(ValueError, match=rf"must be of a known version \({known}\), got 99\.0"):
        patch(host.framework)
    assert host.is_untouched()
    with patch(host.framework, any_version=True) as done:
        assert set(PLACES[host.framework]) <= set(done.patched)
    assert host.is_untouched()


@every_host
@pytest.mark.parametrize("build", [None, "+8c6d533"], ids=["no metadata", "a build of a version"])
def test_checkouts(host: Host, build: str | None) -> None:
    """Without metadata the arguments decide; NeMo-RL's version names the commit behind a "+"."""
    host.version = None if build is None else f"{host.version}{build}"
    with patch(host.framework) as done:
        assert set(PLACES[host.framework]) <= set(done.patched)
    assert host.is_untouched()


def _renamed(logits: Any, labels: Any, temp: float = 1.0, tp_group: Any = None, chunk_size: int = 1024) -> None: ...
def _swapped(labels: Any, logits: Any, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1) -> None: ...
def _without_mask(
    logits: Any, tokens: Any, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1
) -> None: ...
def _with_lengths(
    logits: Any,
    *,
    args: Any,
    unconcat_tokens: Any,
    total_lengths: Any,
    response_lengths: Any,
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Any = None,
) -> None: ...


class _NoChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vocab_parallel_logits: Any, tp_group: Any, inference_only: bool = False) -> Any: ...


CHANGED = {
    # Names, places and defaults; what slime had before pull request 2144 and in 0.2, whose results have another form.
    "areal renamed": (
        "areal.utils.functional.vocab_parallel.gather_logprobs",
        _renamed,
        "temp is not known, temperature is missing",
    ),
    "areal swapped": (
        "areal.utils.functional.vocab_parallel.gather_logprobs",
        _swapped,
        "labels is in another place, logits is in another place, chunk_size has another default",
    ),
    "slime without masks": (
        "slime.utils.ppo_utils.calculate_log_probs_and_entropy",
        _without_mask,
        "log_prob_keep_mask is missing",
    ),
    "slime with lengths": (
        "slime.backends.megatron_utils.loss.get_log_probs_and_entropy",
        _with_lengths,
        "max_seq_lens is not known, top_p_token_ids is missing, top_p_token_offsets is missing",
    ),
    "nemo_rl without chunks": (
        "nemo_rl.distributed.model_utils.ChunkedDistributedEntropy",
        _NoChunks,
        "tp_group is in another place, inference_only is in another place, chunk_size is missing",
    ),
}


@pytest.mark.parametrize(
    ("host", "change"), [(name.split()[0], name) for name in CHANGED], indirect=["host"], ids=CHANGED
)
@pytest.mark.parametrize("version", ["known", None, "99.0"])
def test_other_arguments(host: Host, change: str, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the place and the difference, whatever the version says, and nothing is replaced."""
    place, function, difference = CHANGED[change]
    home, name = place.rsplit(".", 1)
    monkeypatch.setattr(sys.modules[home], name, function)
    host.before = [dict(vars(module)) for module in host.modules]
    host.version = host.version if version == "known" else version
    with pytest.raises(ValueError, match=rf"{place} must take the arguments \(.*\), got \(.*\): {difference}$"):
        patch(host.framework, any_version=version == "99.0")
    assert host.is_untouched()


@every_host
def test_a_function_that_is_gone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    home, names = next(iter(_frameworks.FRAMEWORKS[host.framework].functions.items()))
    monkeypatch.delattr(sys.modules[home], names[-1])
    host.before = [dict(vars(module)) for module in host.modules]
    with pytest.raises(ValueError, match=f"{home}.{names[-1]} does not exist in this version"):
        patch(host.framework)
    assert host.is_untouched()


@pytest.mark.parametrize("framework", [name for name in PLACES if importlib.util.find_spec(name) is None])
def test_not_installed(framework: str) -> None:
    with pytest.raises(ImportError, match=framework):
        patch(framework)


@pytest.mark.parametrize(
    "name", ["from_parallel_logits_to_logprobs", "from_parallel_logits_to_logprobs_packed_sequences"]
)
def test_functions_that_are_not_replaced_take_the_arguments(name: str) -> None:
    """NeMo-RL's functions call the classes and stay; those of the adapter, to be imported, take what they take."""
    adapter = importlib.import_module("ppo_ops.integrations.nemo_rl")
    own = hosts.nemo_rl()[0]
    theirs, ours = (_patch._parameters(getattr(module, name)) for module in (own, adapter))
    assert _patch._differences(theirs, ours, ()) == []
