"""What is hung into vLLM's in-process model and runner: each hook does what one of vLLM's own features does elsewhere.

``LogitRule``     cuts logits beyond the tokenizer's vocabulary, and scales those that prompt log-probs are made of
                  (vLLM applies no temperature to prompt tokens)
``ForcedTokens``  what ``SamplingParams.trace_decode_token_ids`` does on model runner V2: the sampler's choice is
                  replaced by a given token, whose log-prob is gathered as that of any sampled one
``RouteRecorder`` what ``enable_return_routed_experts`` does there: the expert ids of every position that was computed

The last two read the runner's batch and need model runner V1 without compilation. ``has_batch`` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lockstep.records import RouteArray, compact_routes


def model_runner(llm: Any) -> Any:
    """The single worker's model runner of an in-process ``vllm.LLM``."""
    return llm.llm_engine.model_executor.driver_worker.model_runner


def served_model(llm: Any) -> torch.nn.Module:
    """The module that it computes with, out of any wrapper."""
    return model_runner(llm).get_model()


def has_batch(runner: Any) -> bool:
    """Whether the runner keeps its requests as model runner V1 does, in ``input_batch`` and ``requests``."""
    return hasattr(runner, "input_batch") and hasattr(runner, "requests") and hasattr(runner, "query_start_loc")


class LogitRule:
    """Wraps the model's ``compute_logits``: ids from ``vocab_limit`` on get −inf, everything is divided by
    ``temperature`` (1 except while prompt tokens are scored)."""

    def __init__(self, model: torch.nn.Module, vocab_limit: int | None) -> None:
        self.temperature = 1.0
        self._vocab_limit = vocab_limit
        self._compute: Callable[..., torch.Tensor | None] = model.compute_logits  # pyright: ignore
        model.compute_logits = self._logits  # pyright: ignore

    def _logits(self, *arguments: Any, **keywords: Any) -> torch.Tensor | None:
        logits = self._compute(*arguments, **keywords)
        if logits is None:
            return None
        if self._vocab_limit is not None and logits.shape[-1] > self._vocab_limit:
            logits[..., self._vocab_limit :] = -torch.inf
        return logits if self.temperature == 1.0 else logits.float() / self.temperature


class ForcedTokens:
    """Makes requests emit given tokens. ``by_request``: vLLM's internal request id → tokens in order."""

    def __init__(self, runner: Any) -> None:
        self.by_request: dict[str, Sequence[int]] = {}
        self._runner = runner
        self._sample = runner.sampler.sample
        runner.sampler.sample = self._forced

    def _forced(self, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, logprobs = self._sample(*arguments, **keywords)
        if not self.by_request:
            return sampled, logprobs
        for row, request_id in enumerate(self._runner.input_batch.req_ids):
            tokens = self.by_request.get(request_id)
            if tokens is None:
                continue
            position = len(self._runner.requests[request_id].output_token_ids)
            if position < len(tokens):
                sampled[row] = tokens[position]
        return sampled, logprobs


@dataclass(slots=True)
class _Positions:
    """Expert ids [n, L, K] of the positions from ``start`` on."""

    start: int
    ids: np.ndarray


@dataclass(slots=True)
class _Layer:
    """What one router chose in the forward that runs: pieces [tokens, K]."""

    pieces: list[torch.Tensor] = field(default_factory=list)

    def capture(self, ids: torch.Tensor) -> None:
        self.pieces.append(ids.detach())


class RouteRecorder:
    """Collects the expert ids of wanted requests, by vLLM's internal request id. Raises ValueError for a model
    without routers that can be captured."""

    def __init__(self, model: torch.nn.Module, runner: Any) -> None:
        routers = _routers(model)
        if not routers:
            raise ValueError(f"{type(model).__name__} has no router whose expert ids could be captured")
        self.num_experts = max(int(router.global_num_experts) for router in routers)
        self._runner = runner
        self._layers = [_Layer() for _ in routers]
        self._wanted: dict[str, list[_Positions]] = {}
        for router, layer in zip(routers, self._layers, strict=True):
            router.capture_fn = layer.capture
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def want(self, request_id: str) -> None:
        """Collect for this request from its next forward on."""
        self._wanted[request_id] = []

    def take(self, request_id: str, length: int) -> RouteArray:
        """Expert ids [length, L, K] of the request's first positions, flagged missing where none came; forgets it.

        A position that was computed again (after a pause) keeps its first ids: its token was sampled by those.
        """
        found = self._wanted.pop(request_id)
        if not found:
            return compact_routes(np.full((length, len(self._layers), 1), -1), self.num_experts)
        routes = np.full((length, *found[0].ids.shape[1:]), -1, dtype=np.int64)
        for positions in reversed(found):
            stop = min(length, positions.start + len(positions.ids))
            routes[positions.start : stop] = positions.ids[: max(0, stop - positions.start)]
        return compact_routes(routes, self.num_experts)

    def drop(self, request_id: str) -> None:
        """Forget a request that ends without its ids."""
        self._wanted.pop(request_id, None)

    def _begin(self, *_hook: Any) -> None:
        for layer in self._layers:
            layer.pieces.clear()

    def _end(self, *_hook: Any) -> None:
        batch = self._runner.input_batch
        rows = [(row, one) for row, one in enumerate(batch.req_ids) if one in self._wanted]
        if not rows:
            return
        ids = torch.stack([torch.cat(layer.pieces) for layer in self._layers], dim=1).cpu().numpy()
        starts = self._runner.query_start_loc.np
        for row, request_id in rows:
            fed = ids[starts[row] : starts[row + 1]].astype(np.int64)
            self._wanted[request_id].append(_Positions(int(batch.num_computed_tokens_cpu[row]), fed))


def _routers(model: torch.nn.Module) -> list[Any]:
    """Routers that tell whom they chose, in layer order, each once (several modules of a layer may hold it)."""
    found: dict[int, Any] = {}
    for module in model.modules():
        router = getattr(module, "router", None)
        if router is not None and hasattr(router, "capture_fn") and hasattr(router, "global_num_experts"):
            found.setdefault(id(router), router)
    return list(found.values())
