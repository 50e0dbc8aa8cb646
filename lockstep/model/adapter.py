"""The one place that knows transformers' moving API: body and head apart, key/value caches, expert ids.

``SplitModel`` runs a causal model's body once and its head on chosen rows. The head is the model's *own* forward with
the body replaced by the given states, so that logit scales, soft caps and sliced vocabularies are right for every
architecture without a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import torch

from lockstep.model.load import ModelError
from lockstep.records import RouteArray, route_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SplitModel:
    """A causal language model as ``hidden`` (body) and ``logits`` (head). Raises ModelError if it has no such split, or
    if its state between tokens is no cache that can be handed to it."""

    def __init__(self, model: PreTrainedModel) -> None:
        body = model.base_model
        if body is model or not hasattr(model, "lm_head"):
            raise ModelError(
                f"{type(model).__name__} has no body under a language-model head, lm_head; use another architecture, "
                "for example qwen3"
            )
        self.model = model
        # Heads of OPT and Bart call the body's decoder, past the body's own forward.
        self.body = body = getattr(body, "decoder", body)
        self.cache_argument = _cache_argument(body)
        # Bamba's own default counts from 0 in every forward, whatever its cache holds.
        self._forgets_positions = model.config.model_type == "bamba"

    def hidden(
        self,
        input_ids: torch.Tensor,
        *,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **extra: Any,
    ) -> torch.Tensor:
        """Final hidden states [B, T, H] of ``input_ids`` [B, T] int64; ``cache`` is updated in place.

        ``extra`` keywords go through the body to its attention function.
        """
        ids = input_ids.to(self.model.device)
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None, **extra}
        if position_ids is not None:
            arguments["position_ids"] = position_ids
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        if cache is not None:
            arguments[self.cache_argument] = cache
            if position_ids is None and self._forgets_positions:
                past = cache.get_seq_length()
                arguments["position_ids"] = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        return self.body(**arguments)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of hidden states [n, H], in the model's dtype."""
        with _body_returns(self.body, hidden[None]):
            placeholder = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
            return self.model(input_ids=placeholder, use_cache=False).logits[0]

    def new_cache(self) -> Any:
        """An empty cache of the kind that this architecture needs."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)


def _cache_argument(body: torch.nn.Module) -> str:
    """The name under which ``body`` takes a ``DynamicCache``: transformers renames it between releases, and state-space
    models (Mamba) call it ``cache_params``. Under a wrong name a body ignores the cache, and every token would be
    decoded as if it were the first. Raises ModelError for a body that keeps its state in another way."""
    from transformers import Cache, DynamicCache

    parameters = inspect.signature(body.forward).parameters
    name = next((name for name in ("past_key_values", "cache", "cache_params") if name in parameters), None)
    if name is None:
        found = "takes no cache"
    else:
        annotation = parameters[name].annotation
        kinds = get_args(annotation) or (annotation,)
        own = [kind for kind in kinds if isinstance(kind, type) and kind.__name__.endswith("Cache")]
        if not own or not {Cache, DynamicCache}.isdisjoint(own):
            return name
        found = f"takes {own[0].__name__} as {name}"
    raise ModelError(
        f"{type(body).__name__} {found}, and Lockstep decodes with transformers' DynamicCache alone; use an "
        "architecture that takes one, for example qwen3 or mamba2"
    )


@contextmanager
def _body_returns(body: torch.nn.Module, hidden: torch.Tensor) -> Iterator[None]:
    """Inside, the body gives ``hidden``. Raises ModelError if the head did not ask it for its states exactly once."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Output(MoeModelOutputWithPast):
        """Heads copy fields of their body's own output type (GPT-2: ``cross_attentions``): all are None here."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("_"):
                raise AttributeError(name)

    output = Output(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]
    calls = 0

    def given(*_args: Any, **_kwargs: Any) -> Output:
        nonlocal calls
        calls += 1
        return output

    body.forward = given
    try:
        yield
    finally:
        del body.forward
    if calls != 1:  # logits of something else: engine and trainer would agree on them, and both be wrong
        raise ModelError(f"{type(body).__name__}: its head called it {calls} times instead of once; it can't be split")


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's MoE routers in layer order. In transformers 5 a router returns (logits, scores, expert ids)."""
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def num_experts(model: torch.nn.Module) -> int:
    """Routed experts of a MoE layer, of the widest if layers differ. ValueError for a model without experts."""
    counts = [int(router.num_experts) for router in routers(model)]  # pyright: ignore[reportArgumentType]
    if not counts:
        raise ValueError(f"{type(model).__name__} has no routers of experts")
    return max(counts)


def stacked_routes(layers: Sequence[torch.Tensor], num_experts: int) -> RouteArray:
    """Expert ids [..., L, K] of the layers' [..., K], as they travel with a sequence."""
    return torch.stack(list(layers), dim=-2).cpu().numpy().astype(route_dtype(num_experts))


@contextmanager
def recorded_routes(model: torch.nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """While the block runs, collect expert ids: one list per router, one tensor [tokens, K] per forward."""
    records: list[list[torch.Tensor]] = []
    handles = []
    for router in routers(model):
        record: list[torch.Tensor] = []
        records.append(record)

        def hook(_module: torch.nn.Module, _inputs: Any, output: Any, record: list[torch.Tensor] = record) -> None:
            record.append(output[2].detach())

        handles.append(router.register_forward_hook(hook))
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()
