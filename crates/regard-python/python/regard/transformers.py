"""regard as an attention implementation of Hugging Face transformers.

    import regard.transformers
    regard.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="regard")
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

import regard
import regard.torch

__all__ = ["attention_forward", "attention_mask", "register"]


def register(name: str = "regard") -> None:
    """Adds regard to transformers' attention implementations: `attn_implementation="regard"`."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def _window_of(mask_function) -> int | None:
    """The window of transformers' `sliding_window_causal_mask_function(window)`; None for other masks."""
    parts = _contents(mask_function)
    functions = parts[0] if len(parts) == 1 and isinstance(parts[0], tuple) else ()
    windows = [f for f in functions if getattr(f, "__qualname__", "").startswith("sliding_window_overlay.")]
    others = [f for f in functions if f is not causal_mask_function and f not in windows]
    if len(windows) != 1 or others or len(functions) != 2:
        return None
    values = _contents(windows[0])
    return values[0] if len(values) == 1 and isinstance(values[0], int) else None


def _contents(function) -> list:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def attention_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=causal_mask_function,
    attention_mask=None,
    local_size=None,
    allow_is_causal_skip=True,
    **options,
):
    """The mask that `attention_forward` gets: None where the new tokens are the last ones of the cache, none
    is padding, and the mask is causal or a causal window, which regard computes from positions. Else that
    of "sdpa": boolean, true where a key is seen, [B, 1, Lq, Lk]."""
    arguments = dict(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
    )
    if allow_is_causal_skip and not torch.compiler.is_compiling():
        plain = mask_function is causal_mask_function if local_size is None else _window_of(mask_function) == local_size
        last = int(q_offset) + q_length == int(kv_offset) + kv_length
        padded = attention_mask is not None and not bool(attention_mask.all())
        if plain and last and not padded:
            return None
    # "sdpa" leaves the mask out where its own `is_causal` serves, which aligns the first key with the
    # first query; None means another alignment here.
    return sdpa_mask(batch_size, allow_is_causal_skip=False, **arguments, **options)


def attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    **options,
):
    """transformers' attention function: query [B, Hq, Lq, D], key and value [B, Hkv, Lk, D]; the result is
    [B, Lq, Hq, D], and None for the weights."""
    if dropout:
        raise regard.ArgumentError("`dropout` is {}; allowed: 0, regard is for inference only".format(dropout))
    if options.get("position_bias") is not None:
        raise regard.ArgumentError("`position_bias` is given; allowed: none")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    choices = dict(scale=scaling, softcap=softcap, sinks=None if s_aux is None else s_aux.float())
    if attention_mask is not None:
        choices["mask"] = attention_mask
    elif is_causal:
        choices["causal"] = True
        if sliding_window is not None:
            choices["window"] = (sliding_window - 1, None)
    # A transposed view: the result is contiguous as [B, Lq, Hq, D], which the model wants next.
    arguments = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return regard.torch.attention(*arguments, **choices), None
    return regard.attention(*arguments, **choices), None
