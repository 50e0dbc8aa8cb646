"""An engine in another process, as its owner sees it: ``interfaces.Engine`` and ``interfaces.WeightReceiver``.

Everything goes over one socket as frames without pickle, except the bytes of a refit where a transport has a better
way: it calls ``hand_over``, whose messages reach its other end (``engine_process.Inlet``) in the engine's process.
Errors come back with the type and text that they had there. An engine whose process has ended serves nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch

from lockstep.interfaces import LogProbs
from lockstep.records import (
    Completion,
    DerivedReport,
    GenerateRequest,
    LiveTensor,
    Manifest,
    Naming,
    Quantisation,
    Sequence,
)
from lockstep.rollout import messages
from lockstep.rollout.process_link import EngineProcess, EngineProcessError
from lockstep.rollout.receiver import RefitRefused
from lockstep.rollout.wire import Frame

_IN_FLIGHT = 2
"""Tensors that travel over the socket while earlier ones are loaded."""


class RemoteEngine:
    """``interfaces.Engine`` over an ``EngineProcess``, which it owns: ``close`` ends the process."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self._receiver = RemoteReceiver(process, process.started["naming"], process.started["quantisation"])
        self._outbox: list[tuple[GenerateRequest, asyncio.Future[Future[Frame]]]] = []

    @property
    def version(self) -> int:
        """Policy version that the engine served when it last answered."""
        return self.process.version

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion there. Requests of one turn of the event loop go out together, so that they are batched
        as in this process. A caller that is cancelled aborts the request."""
        loop = asyncio.get_running_loop()
        posted: asyncio.Future[Future[Frame]] = loop.create_future()
        if not self._outbox:
            loop.call_soon(self._send_out)
        self._outbox.append((request, posted))
        asked = await posted
        try:
            frame = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            with suppress(EngineProcessError):  # a process that is gone samples nothing
                self.process.post("abort", {"request_ids": [request.request_id]})
            raise
        return messages.read_completion(frame.header["value"], frame.arrays)

    def _send_out(self) -> None:
        """Post the requests that have gathered, those of cancelled callers left out."""
        out = [(request, posted) for request, posted in self._outbox if not posted.done()]
        self._outbox = []
        if not out:
            return
        arrays: list[np.ndarray] = []
        header = {"requests": [messages.plain(request, arrays) for request, _ in out]}
        try:
            answers = self.process.post_together("generate", len(out), header, arrays)
        except Exception as error:
            for _, posted in out:
                posted.set_exception(error)
            return
        for (_, posted), asked in zip(out, answers, strict=True):
            posted.set_result(asked)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Complete requests with what they have sampled so far."""
        self._send_out()
        await asyncio.wrap_future(self.process.post("abort", {"request_ids": list(request_ids)}))

    def score(self, sequences: Seq[Sequence], path: Literal["prefill", "decode"] = "prefill") -> dict[str, LogProbs]:
        """Log-probs of given tokens."""
        arrays: list[np.ndarray] = []
        frame = self.process.ask("score", {"sequences": messages.plain(sequences, arrays), "path": path}, arrays)
        return {key: messages.read_logprobs(one, frame.arrays) for key, one in frame.header["value"].items()}

    def pause(self, mode: Literal["finish", "abort", "keep"] = "finish") -> None:
        """Stop admission; nothing decodes when this returns."""
        self.process.ask("pause", {"mode": mode})

    def resume(self) -> None:
        """Admit again."""
        self.process.ask("resume")

    def receiver(self) -> RemoteReceiver:
        """The engine's side of a refit."""
        return self._receiver

    def close(self) -> None:
        """End the process."""
        self.process.close()


class RemoteReceiver:
    """``interfaces.WeightReceiver`` of an engine in another process."""

    def __init__(self, process: EngineProcess, naming: Naming, quantisation: Quantisation) -> None:
        self._process = process
        self._naming: Naming = naming
        self._quantisation: Quantisation = quantisation

    @property
    def naming(self) -> Naming:
        """As the engine's own receiver says."""
        return self._naming

    @property
    def quantisation(self) -> Quantisation:
        """As the engine's own receiver says."""
        return self._quantisation

    def hand_over(self, message: dict[str, Any]) -> Future[dict[str, Any]]:
        """Send a transport's message to its other end without waiting; the future holds what that answers."""
        answer: Future[dict[str, Any]] = Future()

        def pass_on(asked: Future[Frame]) -> None:
            if (error := asked.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(asked.result().header["value"])

        self._process.post("hand_over", {"message": message}).add_done_callback(pass_on)
        return answer

    def begin(self, manifest: Manifest) -> None:
        """As the engine's own: refuses by name before a byte moves."""
        self._process.ask("begin", {"manifest": messages.plain(manifest, [])})

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send tensors over the socket, each whole. Slower than a transport with memory of its own."""
        in_flight: deque[Future[Frame]] = deque()
        for name, tensor in tensors:
            form, data = messages.tensor_bytes(tensor)
            in_flight.append(self._process.post("receive", {"name": name, "tensor": form}, [data]))
            if len(in_flight) >= _IN_FLIGHT:
                in_flight.popleft().result()
        for asked in in_flight:
            asked.result()

    def alias(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refused: storage of one process can't be another's."""
        raise RefitRefused("an engine in a process of its own can't alias the trainer's weights; use transport shm")

    def commit(self) -> tuple[DerivedReport, ...]:
        """Rebuild derived state, drop caches, take up the new version."""
        return messages.read_reports(self._process.ask("commit").header["value"])

    def resume(self) -> None:
        """Admit requests again."""
        self._process.ask("resume_refit")

    def abort(self, reason: str) -> None:
        """Leave the engine unfit. One whose process has ended serves nothing already."""
        try:
            self._process.ask("abort_refit", {"reason": reason})
        except EngineProcessError:
            return

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Live tensors, fetched over the socket some at a time."""
        self._process.ask("live_start")
        while True:
            frame = self._process.ask("live_next")
            if not frame.arrays:
                return
            for form, data in zip(frame.header["value"], frame.arrays, strict=True):
                yield form["name"], messages.bytes_tensor(form, data)

    def described(self, key: int | None) -> Iterator[LiveTensor]:
        """What is live, some at a time; digests under ``key`` are made in the engine's process."""
        self._process.ask("described_start", {"key": key})
        while found := self._process.ask("described_next").header["value"]:
            yield from messages.read_live(found)

    def opaque(self) -> dict[str, str]:
        """Names whose live layout can't be undone."""
        return self._process.ask("opaque").header["value"]

    def reload_differences(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str | None]]:
        """Send the tensors and compare there. The engine's process holds all of them at once for that."""
        for name, tensor in tensors:
            form, data = messages.tensor_bytes(tensor)
            self._process.ask("reload_add", {"name": name, "tensor": form}, [data])
        for name, difference in self._process.ask("reload_run").header["value"]:
            yield name, difference

    def derived(self) -> tuple[DerivedReport, ...]:
        """Compare registered derived state with a rebuild, without changing it."""
        return messages.read_reports(self._process.ask("derived").header["value"])
