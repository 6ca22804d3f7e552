"""Attention over KV pages for any transformers model that routes attention through AttentionInterface.

A function is registered under the name NAME; the model is told to use it and called with one more keyword,
`paged`, an object with the one method `attend`. No mask function is registered under that name, so
transformers builds no mask: causality and windows are the kernel's. The model runs with `use_cache=False`
on one flattened row of tokens; no model code is patched and no Cache subclass is involved.

Whatever changes a layer's mathematics arrives here as a keyword and is honoured (scale, sliding window,
soft cap, sinks) or refused: an attention that ignores a keyword it does not know gives wrong text silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from blockmgr_kernels import paged_attention, write_kv
from blockmgr_kernels import plan as plan_runs
from transformers import AttentionInterface

from .errors import BadInput
from .pages import KVPages, LayerShape

NAME = "blockmgr_paged"

# Keywords that reach an attention function in evaluation and change nothing that is computed here.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_router_logits", "cache_position", "dropout"}
)
# Layers whose visible tokens are all of the past or a window of it.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Rotary variants whose angles depend on the longest sequence of the call: a token's key would depend on its
# neighbours in the batch, and could not be reused.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class UnsupportedModel(BadInput):
    """The model computes attention in a way that cannot be served from pages; one line says which."""


@dataclass(frozen=True)
class Options:
    """What a layer's attention takes besides tensors; defaults mean 'without'."""

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None


class Attends(Protocol):
    """What the model's `paged` keyword carries through to every attention layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """query [T, H, D], key and value [T, KVH, D], after rotary; returns [T, H, D]."""
        ...


class PagedStep:
    """One forward pass over a ragged batch. Made once per step and shared by all layers.

    Row s has the queries `query_starts[s]:query_starts[s+1]`, the last of its `lengths[s]` tokens, whose
    keys and values go to `slots` (int64 [T]) and are read through `block_tables` (int32 [S, W]).
    """

    def __init__(
        self,
        pages: KVPages,
        block_tables: np.ndarray[Any, Any],
        query_starts: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
        slots: np.ndarray[Any, Any],
    ) -> None:
        self.pages = pages
        self.plan = plan_runs(block_tables, lengths, pages.block_size)
        self.block_tables, self.query_starts, self.lengths, self.slots = (
            self._place(metadata) for metadata in (block_tables, query_starts, lengths, slots)
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        keys, values = self.pages.keys[layer], self.pages.values[layer]
        write_kv(key, value, keys, values, self.slots)
        return paged_attention(
            query, keys, values, self.block_tables, self.query_starts, self.lengths,
            scale=options.scale, window=options.window, soft_cap=options.soft_cap, sinks=options.sinks,
            plan=self.plan,
        )  # fmt: skip

    def _place(self, metadata: np.ndarray[Any, Any]) -> Any:
        device = self.pages.keys[0].device
        return metadata if device.type == "cpu" else torch.from_numpy(metadata).to(device)


class _Probe:
    """Stands in for a step: attends a single token to itself and notes what each layer would cache."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        if layer in self.layers:
            raise UnsupportedModel(f"layer {layer} computes attention twice in one pass")
        if key.shape != value.shape:
            raise UnsupportedModel(
                f"layer {layer} caches keys {tuple(key.shape[1:])} and values {tuple(value.shape[1:])}; "
                "pages hold equal shapes"
            )
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], key.dtype, key.device)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def serve_from_pages(model: Any) -> list[LayerShape]:
    """Switch a causal transformers model to paged attention; returns what each layer caches per token.

    From here on the model must be called with `paged=PagedStep(...)`. Raises UnsupportedModel, and leaves
    the model as it was, if its attention is not one that pages can serve.
    """
    _refuse_by_config(model)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        return _probe(model)
    except Exception:
        model.set_attn_implementation(before)
        raise


def _refuse_by_config(model: Any) -> None:
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder; only decoder-only models are served")
    strange = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if strange:
        raise UnsupportedModel(
            f"{config.model_type} has layers of type {', '.join(sorted(strange))}; "
            f"served are {', '.join(sorted(_LAYER_TYPES))}"
        )
    for kind in _rope_types(getattr(config, "rope_parameters", None)):
        if kind in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedModel(f"{config.model_type} rotates by the batch's longest sequence ({kind} rope)")


def _rope_types(parameters: Any) -> Sequence[str]:
    """rope_type of one set of parameters, or of one set per layer type."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [parameters["rope_type"]]
    return [part["rope_type"] for part in parameters.values() if isinstance(part, dict) and "rope_type" in part]


def _probe(model: Any) -> list[LayerShape]:
    config, probe = model.config.get_text_config(), _Probe()
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=one, position_ids=one, use_cache=False, paged=probe)
    if sorted(probe.layers) != list(range(config.num_hidden_layers)):
        raise UnsupportedModel(
            f"{len(probe.layers)} of {config.num_hidden_layers} layers of {config.model_type} use AttentionInterface"
        )
    return [probe.layers[layer] for layer in range(config.num_hidden_layers)]


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    paged: Attends | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls: query [1, H, T, D], key and value [1, KVH, T, D] -> [1, T, H, D]."""
    unknown = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if unknown:
        raise UnsupportedModel(f"attention keywords {', '.join(sorted(unknown))} are not understood")
    if paged is None:
        raise UnsupportedModel("call the model with paged=PagedStep(...), or set another attention function")
    if attention_mask is not None:
        raise UnsupportedModel("an attention mask was built; pages serve causal attention without one")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel("the attention is not causal")
    options = Options(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        soft_cap=softcap or 0.0,
        sinks=s_aux,
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged.attend(module.layer_idx, query, key, value, options).unsqueeze(0), None


AttentionInterface.register(NAME, _attention)
