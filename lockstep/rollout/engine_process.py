"""An engine that lives in a process of its own: what runs there.

    owner's process                                      this process
    RemoteEngine ──frames over a socketpair──▶ reader thread ─▶ EngineServer (event loop) ─▶ Engine
    a transport  ──bytes by its own way──────▶ Inlet ──────────────────────────────────────▶ engine.receiver()

The server answers frames in order; a completion is answered when it is finished. While the engine computes, nothing is
answered, so silence means that a step hangs. The process ends with its owner: when the socket closes or the owner's
process id is no longer its parent, it exits, whatever it was computing. A refit whose owner says nothing for
``timeout_s`` is given up here: the engine is unfit until a full refit commits.

How bytes arrive is injected (``Inlet``): engines know nothing of transports.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from lockstep.environment.recorded import recorded_reads
from lockstep.interfaces import Engine, WeightReceiver
from lockstep.records import Manifest
from lockstep.rollout import messages
from lockstep.rollout.shown_weights import SHOWN, Answer, ShownWeights
from lockstep.rollout.wire import Channel, Frame, WireError

_OWNER_POLL_S = 0.5
"""How often a process that is building its engine looks whether its owner is still there."""

NO_WEIGHTS = "its weights are random: no refit has committed yet"


class Inlet(Protocol):
    """The end of a transport in the engine's process."""

    def handle(self, message: dict[str, Any], receiver: WeightReceiver, manifest: Manifest) -> dict[str, Any]:
        """Take what the message announces and hand it to the receiver; the answer goes back to the sender."""
        ...

    def refit_over(self) -> None:
        """The refit committed: no transfer is open any more. Memory that the next can use may stay."""
        ...

    def close(self) -> None:
        """Let go of all memory that belongs to a transfer."""
        ...


class RefitGivenUp(RuntimeError):
    """The owner came back to a refit that this process had given up."""


class EngineServer:
    """Serves one engine to one owner over a channel until the owner closes it."""

    def __init__(self, channel: Channel, engine: Engine, inlet: Inlet, *, timeout_s: float) -> None:
        self._channel, self._engine, self._inlet, self._timeout_s = channel, engine, inlet, timeout_s
        self._receiver = engine.receiver()
        self._manifest: Manifest | None = None  # of the refit that runs
        self._deadline = 0.0  # when that refit is given up
        self._given_up: str | None = None
        self._shown = ShownWeights(self._receiver)
        self._tasks: set[asyncio.Task[None]] = set()
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def serve(self, owner_gone: Callable[[], None], check_owner: Callable[[], None]) -> None:
        """Until a frame says close. A thread reads frames, so that the end of the owner is seen during a computation
        too: ``owner_gone`` is called there, ``check_owner`` raises WireError if the owner is no more."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(self._frames.put_nowait, self._channel.receive(check_owner))
            except (WireError, RuntimeError):  # RuntimeError: the loop is closed, after a frame that said so
                owner_gone()

        threading.Thread(target=read, name="frames", daemon=True).start()
        while (frame := await self._next_frame()).header["op"] != "close":
            header = frame.header
            if header["op"] == "generate":
                # All are tasks before the first runs: requests that come together are batched together.
                for number, request in zip(header["ids"], header["requests"], strict=True):
                    self._keep(loop.create_task(self._generate(number, request, frame.arrays)))
            elif header["op"] == "abort":
                self._keep(loop.create_task(self._abort(header["id"], header["request_ids"])))
            else:
                self._answer(header["id"], lambda frame=frame: self._done(frame))

    def _done(self, frame: Frame) -> Answer:
        name = frame.header["op"]
        shown = SHOWN.get(name)
        return _OPERATIONS[name](self, frame) if shown is None else shown(self._shown, frame)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _next_frame(self) -> Frame:
        while True:
            left_s = max(self._deadline - time.monotonic(), 0.0) if self._manifest else None
            try:
                return await asyncio.wait_for(self._frames.get(), left_s)
            except TimeoutError:
                self._give_up(f"its owner said nothing for {self._timeout_s:g} s in the middle of a refit")

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _generate(self, number: int, request: dict[str, Any], arrays: list[np.ndarray]) -> None:
        out: list[np.ndarray] = []
        try:
            completion = await self._engine.generate(messages.read_request(request, arrays))
        except Exception as error:
            caught = error
            self._answer(number, lambda: _raise(caught))
            return
        self._answer(number, lambda: (messages.plain(completion, out), out))

    async def _abort(self, number: int, request_ids: list[str]) -> None:
        try:
            await self._engine.abort(request_ids)
        except Exception as error:
            caught = error
            self._answer(number, lambda: _raise(caught))
            return
        self._answer(number, lambda: (None, []))

    def _answer(self, number: int, compute: Callable[[], Answer]) -> None:
        reply: dict[str, Any] = {"id": number}
        try:
            reply["value"], arrays = compute()
        except Exception as error:
            reply["error"], arrays = {"type": type(error).__name__, "text": str(error)}, []
        self._channel.send(reply | {"version": self._engine.version}, arrays, timeout_s=self._timeout_s)

    def _ping(self, _frame: Frame) -> Answer:
        return None, []

    def _score(self, frame: Frame) -> Answer:
        sequences = [messages.read_sequence(one, frame.arrays) for one in frame.header["sequences"]]
        arrays: list[np.ndarray] = []
        return messages.plain(self._engine.score(sequences, frame.header["path"]), arrays), arrays

    def _pause(self, frame: Frame) -> Answer:
        self._engine.pause(frame.header["mode"])
        return None, []

    def _resume(self, _frame: Frame) -> Answer:
        self._engine.resume()
        return None, []

    # --- refit --------------------------------------------------------------------------------------------------------

    def _begin(self, frame: Frame) -> Answer:
        manifest = messages.read_manifest(frame.header["manifest"])
        self._receiver.begin(manifest)  # raises without a trace if it refuses, or if another refit runs
        self._manifest, self._given_up = manifest, None
        self._renew()
        return None, []

    def _hand_over(self, frame: Frame) -> Answer:
        with _AbortOnError(self) as manifest:
            return self._inlet.handle(frame.header["message"], self._receiver, manifest), []

    def _receive(self, frame: Frame) -> Answer:
        with _AbortOnError(self):
            tensor = messages.bytes_tensor(frame.header["tensor"], frame.arrays[0])
            self._receiver.receive([(frame.header["name"], tensor)])
            return None, []

    def _commit(self, _frame: Frame) -> Answer:
        with _AbortOnError(self):
            reports = self._receiver.commit()
            self._manifest = None
            self._inlet.refit_over()
            return messages.plain(reports, []), []

    def _resume_refit(self, _frame: Frame) -> Answer:
        self._receiver.resume()
        return None, []

    def _abort_refit(self, frame: Frame) -> Answer:
        self._end_refit()
        self._receiver.abort(frame.header["reason"])
        return None, []

    def _renew(self) -> None:
        self._deadline = time.monotonic() + self._timeout_s

    def _end_refit(self) -> None:
        self._manifest = None
        self._inlet.close()

    def _give_up(self, reason: str) -> None:
        self._end_refit()
        self._given_up = reason
        self._receiver.abort(reason)


class _AbortOnError:
    """A step of the refit that runs: whatever goes wrong in it leaves the engine unfit, here and at once."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    def __enter__(self) -> Manifest:
        server = self._server
        if server._manifest is None:
            if server._given_up:
                raise RefitGivenUp(f"the engine gave this refit up: {server._given_up}")
            raise RuntimeError("no refit has begun: call begin(manifest) first")
        server._renew()
        return server._manifest

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self._server._renew()
        elif self._server._manifest is not None:
            self._server._give_up(f"{type(error).__name__}: {error}")


_OPERATIONS: dict[str, Callable[[EngineServer, Frame], Answer]] = {
    "ping": EngineServer._ping,
    "score": EngineServer._score,
    "pause": EngineServer._pause,
    "resume": EngineServer._resume,
    "begin": EngineServer._begin,
    "hand_over": EngineServer._hand_over,
    "receive": EngineServer._receive,
    "commit": EngineServer._commit,
    "resume_refit": EngineServer._resume_refit,
    "abort_refit": EngineServer._abort_refit,
}


def _raise(error: Exception) -> Answer:
    raise error


def build_engine(settings: dict[str, Any], derived: Callable[[], Any]) -> Engine:
    """The engine that JSON settings describe (made by ``remote_settings``). It serves nothing before a refit commits.

    ``derived`` makes the registry of derived state of an engine that has some. Raises ValueError for an unknown kind.
    """
    kind, decode = settings["engine"], _decoder_of(settings.get("tokenizer"))
    if kind == "torch":
        return _torch_engine(settings, decode)
    if kind == "vllm":
        from lockstep.rollout.vllm_engine import VllmEngine

        device = settings.get("device")
        engine = VllmEngine.from_settings(settings["vllm"], decode=decode, derived=derived(), device=device)
        engine.receiver().abort(NO_WEIGHTS)
        return engine
    raise ValueError(f"unknown engine {kind!r}: expected torch or vllm")


def _decoder_of(source: dict[str, Any] | None) -> Callable[[list[int]], str] | None:
    """Token ids to text, special tokens kept (a stop string may be one), by the tokenizer of a ``ModelSource``."""
    if source is None:
        return None
    from pydantic import TypeAdapter

    from lockstep.config.schema import ModelSource
    from lockstep.model.load import load_tokenizer

    tokenizer = load_tokenizer(TypeAdapter(ModelSource).validate_json(json.dumps(source)))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


def _torch_engine(settings: dict[str, Any], decode: Callable[[list[int]], str] | None) -> Engine:
    """The embedded engine over random weights of the given architecture."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from lockstep.config.schema import RolloutConfig
    from lockstep.model.head import use_float32_head
    from lockstep.model.load import torch_dtype
    from lockstep.rollout.torch_engine import TorchEngine

    rollout = RolloutConfig.model_validate_json(json.dumps(settings["rollout"]))
    described = settings["model_config"]
    model_config = CONFIG_MAPPING[described["model_type"]].from_dict(described)
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch_dtype(settings["model_dtype"]))
    if settings.get("head_dtype") == "float32":
        use_float32_head(model)
    engine = TorchEngine(
        model.to(settings.get("device", "cpu")).to(torch_dtype(rollout.dtype)),  # pyright: ignore[reportArgumentType]
        rollout,
        decode=decode,
        vocab_limit=settings.get("vocab_limit"),
    )
    engine.receiver().abort(NO_WEIGHTS)
    return engine


def run(inlet: Inlet, derived: Callable[[], Any]) -> int:
    """The whole life of an engine's process: ``… <descriptor of the socket> <owner's process id>`` on its command line.

    Ctrl-C and SIGTERM are the owner's business: it finishes its step and closes this process, or ends, and this ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which processes that the engine starts would inherit.
        signal.signal(number, lambda _number, _frame: None)
    descriptor, owner = int(sys.argv[1]), int(sys.argv[2])

    def check_owner() -> None:
        if os.getppid() != owner:
            raise WireError("the owner's process has ended")

    channel = Channel(socket.socket(fileno=descriptor))
    try:
        start = channel.receive(check_owner)
    except WireError:
        return 1  # the owner ended before it said what to start
    timeout_s = start.header["timeout_s"]
    if (threads := start.header["settings"].get("threads")) is not None:
        torch.set_num_threads(threads)
    built = threading.Event()
    threading.Thread(target=_end_with_owner, args=(check_owner, built), name="owner", daemon=True).start()
    try:
        with recorded_reads() as reads:
            engine = build_engine(start.header["settings"], derived)
        server = EngineServer(channel, engine, inlet, timeout_s=timeout_s)
        started = {"naming": server._receiver.naming, "quantisation": server._receiver.quantisation}
        started |= {"reads": reads.as_dict()}
    except Exception as error:
        failed = {"type": type(error).__name__, "text": str(error)}
        channel.send({"id": start.header["id"], "error": failed, "version": -1}, timeout_s=timeout_s)
        return 1
    channel.send({"id": start.header["id"], "value": started, "version": engine.version}, timeout_s=timeout_s)
    built.set()  # from here on the server's own thread looks
    asyncio.run(server.serve(lambda: os._exit(0), check_owner))
    return 0


def _end_with_owner(check_owner: Callable[[], None], built: threading.Event) -> None:
    """While the engine is built nobody listens to the socket, and building may take minutes: end as the owner does."""
    while not built.wait(_OWNER_POLL_S):
        try:
            check_owner()
        except WireError:
            os._exit(1)
