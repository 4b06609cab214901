"""Real ranks for tests: gloo processes that start once and then run many checks.

    POOL.run(function, *args, size=2)    runs `function(group, *args)` on the first `size` ranks; one result a rank

`function` is a module-level function of a test module. Starting a process and importing torch costs seconds on a small
machine, a check costs milliseconds, so four workers serve the whole session: on groups of 1, 2 and 4 ranks that they
make once. Three promises, each with a test of its own in `test_harness.py`: a failure on any one rank reaches the test
with that rank's traceback, a call never outlives its time limit, and the workers never outlive their pool.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

WORLD_SIZE = 4
SIZES = (1, 2, 4)
# Seconds. A rank that waits for a failed one would wait for ever; this is what the others get to fail by themselves.
GRACE = 2.0
TIME_LIMIT = 60.0
START_LIMIT = 120.0


class RankError(AssertionError):
    """A rank failed, or did not answer in time; `failures` maps it to its traceback (None: no answer)."""

    def __init__(self, failures: Mapping[int, str | None], seconds: float) -> None:
        silent = f"no answer after {seconds:.1f} s"
        super().__init__("\n".join(f"rank {rank}: {text or silent}" for rank, text in sorted(failures.items())))
        self.failures = dict(failures)

    @property
    def timed_out(self) -> bool:
        return all(text is None for text in self.failures.values())


def _serve(rank: int, world_size: int, store: str, connection: Connection) -> None:
    """Body of a worker: answer requests until the pool hangs up."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Should the pool vanish without a word, no collective keeps a worker longer than this.
    limit = timedelta(seconds=START_LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    # Made by every rank, as `new_group` demands. None of them is the world group, also where it has the same members.
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in SIZES if size <= world_size}
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            function, size, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            reply = pickle.dumps((True, function(groups[size], *args)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(reply)


class Pool:
    """`world_size` gloo processes that start at the first call, and anew at the first call after a failure."""

    def __init__(self, world_size: int = WORLD_SIZE, env: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self.env = dict(env or {})
        self.processes: list[multiprocessing.context.SpawnProcess] = []
        self._connections: list[Connection] = []
        self._directory: str | None = None
        atexit.register(self.stop)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the workers, unless they run."""
        if self.processes and all(process.is_alive() for process in self.processes):
            return
        self.stop()
        context = multiprocessing.get_context("spawn")
        self._directory = tempfile.mkdtemp(prefix="ppo_ops_ranks_")
        store = str(Path(self._directory) / "store")
        # Torch reads some variables when it is imported, so they must be there when a process begins.
        with mock.patch.dict(os.environ, self.env):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                arguments = (rank, self.world_size, store, theirs)
                process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self._connections.append(ours)
        self._collect(self.world_size, START_LIMIT)

    def stop(self) -> None:
        """End the workers, busy or not."""
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self.processes, self._connections, self._directory = [], [], None

    def run(self, function: Callable[..., Any], *args: Any, size: int, timeout: float = TIME_LIMIT) -> list[Any]:
        """Run `function(group, *args)` on the first `size` ranks; one result a rank, in rank order.

        Raises:
            RankError: a rank raised, died, or took longer than `timeout` seconds. The pool is then ended, because a
                rank may be waiting inside a collective that no other rank will join.
        """
        request = pickle.dumps((function, size, args))
        self.start()
        for connection in self._connections[:size]:
            connection.send_bytes(request)
        return self._collect(size, timeout)

    def _collect(self, size: int, timeout: float) -> list[Any]:
        begin = time.monotonic()
        deadline = begin + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str | None] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections[:size])}
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                rank = pending.pop(connection)  # type: ignore[arg-type]
                succeeded, value = self._receive(connection, rank)  # type: ignore[arg-type]
                (results if succeeded else failures)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures or pending:
            self.stop()
            # With a culprit at hand, ranks that only waited for it are not worth a line.
            failures = failures or dict.fromkeys(pending.values())
            raise RankError(failures, time.monotonic() - begin)
        return [results[rank] for rank in range(size)]

    def _receive(self, connection: Connection, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            self.processes[rank].join(GRACE)
            return False, f"died with exit code {self.processes[rank].exitcode}"


POOL = Pool()
