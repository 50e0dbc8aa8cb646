"""Whether a model can be trained and sampled from at all, seen in its own forward before a run is built on it.

Encoders such as BERT have a language model class too, and read to the right unless a switch in their configuration
says otherwise. Sampled token by token they then answer something else than what a forward over the whole answer
scores, and their loss sees the very token that it predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.model.adapter import SplitModel
from lockstep.model.load import ModelError

_TOKENS = 6
_ROUNDING = 1e-6
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def refuse_unfit(model: Any) -> None:
    """Raises ModelError if the forward of ``model`` fails, looks to the right, or leaves state in its modules.

    Of a causal model the first logits' gradient with respect to a later token is exactly zero, in any architecture and
    dtype: masked attention has the weight 0. A model whose embeddings can't be intercepted is let pass.
    """
    leaves: list[torch.Tensor] = []

    def intercept(_module: torch.nn.Module, _inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        leaves.append(embedded.detach().clone().requires_grad_())
        return leaves[-1].clone()  # models scale their embeddings in place

    handle = model.get_input_embeddings().register_forward_hook(intercept)
    try:
        with torch.enable_grad(), _told(model, f"its forward of {_TOKENS} tokens fails"):
            first = model(input_ids=_some_tokens(model), use_cache=False).logits[0, 0].float()
            weights = torch.arange(len(first), device=first.device).cos()  # a plain sum has none behind a norm
            gradient = torch.autograd.grad(weights @ first, leaves, allow_unused=True)[0] if leaves else None
    finally:
        handle.remove()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                raise ModelError(
                    f"{type(model).__name__} keeps state of its last forward in {name}.{attribute}, where sequences "
                    "would share it; use another architecture, for example qwen3"
                )
    if gradient is None:
        return
    own, *later = gradient.reshape(_TOKENS, -1).float().norm(dim=-1).tolist()
    if max(later) > _ROUNDING * own:
        raise ModelError(
            f"{type(model).__name__} reads the tokens to the right of a position: it is bidirectional as configured, "
            f"and can't be sampled from token by token{_switch(model.config)}; use a causal model, for example qwen3"
        )


@torch.no_grad()
def refuse_undecodable(model: Any) -> None:
    """Raises ModelError if the body of ``model`` fails with a cache, as the embedded engine decodes. Whether it then
    gives the same log-probs is for a refit's probes to say."""
    split = SplitModel(model)
    ids = _some_tokens(model)
    with _told(model, "transformers' decoding with a cache fails for it"):
        cache = split.new_cache()
        split.hidden(ids[:, :-1], cache=cache)
        split.hidden(ids[:, -1:], cache=cache)


def _some_tokens(model: Any) -> torch.Tensor:
    """Different token ids [1, T]."""
    return torch.arange(_TOKENS, device=model.device)[None] % model.get_input_embeddings().num_embeddings


@contextmanager
def _told(model: Any, what: str) -> Iterator[None]:
    """What the model raises as a ModelError."""
    try:
        yield
    except _FAILURES as error:
        if isinstance(error, ModelError | torch.OutOfMemoryError):
            raise
        raise ModelError(
            f"{type(model).__name__}: {what} ({type(error).__name__}: {error}); correct its configuration, or use "
            "another architecture, for example qwen3"
        ) from error


def _switch(config: Any) -> str:
    """The setting of a configuration that makes its attention bidirectional, as far as it is known."""
    wrong = {"is_decoder": False, "use_bidirectional_attention": True, "is_causal": False}
    found = [f"{name} = {str(value).lower()}" for name, value in wrong.items() if getattr(config, name, None) is value]
    return f" (its configuration says {', '.join(found)})" if found else ""
