"""The model runner: turns rows of (tokens, place in the pages) into one forward pass and next tokens.

It knows the model and the pages, not requests and not the manager: a row carries what the manager said.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from .attention import PagedStep, serve_from_pages
from .pages import KVPages, Layout
from .rows import Array, Rows


class ModelRunner:
    """A causal transformers model over its own KV pages of `num_blocks` blocks of `block_size` tokens.

    layout  of the pages, see KVPages
    Raises UnsupportedModel if the model's attention cannot be served from pages.
    """

    def __init__(self, model: Any, num_blocks: int, block_size: int, layout: Layout = "layers") -> None:
        self.model = model
        self.pages = KVPages(serve_from_pages(model), num_blocks, block_size, layout)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_tokens: int = sys.maxsize if limit is None else limit

    @torch.inference_mode()
    def logits(self, rows: Rows, keep: Array) -> torch.Tensor:
        """Feed the rows' tokens, write their KV; logits [len(keep), vocabulary] at flat token indices `keep`.

        The output projection runs only for the kept tokens: a prefill of a thousand needs one row of it.
        """
        step = PagedStep(self.pages, rows.block_tables, rows.query_starts, rows.lengths, rows.slots)
        device = self.model.device
        output = self.model(
            input_ids=torch.from_numpy(rows.tokens)[None].to(device),
            position_ids=torch.from_numpy(rows.positions)[None].to(device),
            use_cache=False,
            logits_to_keep=torch.from_numpy(np.asarray(keep, dtype=np.int64)).to(device),
            paged=step,
        )
        return output.logits[0]

    def greedy(self, rows: Rows, keep: Array) -> Array:
        """The most likely next token at each flat token index in `keep`, int64 [len(keep)]."""
        return self.logits(rows, keep).argmax(dim=-1).cpu().numpy()
