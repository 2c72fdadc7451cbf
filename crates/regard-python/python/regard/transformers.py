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
from regard.torch import _argument_error

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


# Arguments of transformers' models that change the result, and that only other implementations have.
_NOT_TAKEN = {
    "block_indices": "blocks of keys per query are in the mask for \"eager\" and \"sdpa\" only",
    "cache": "paged caches of transformers' continuous batching are for its own implementations",
    "sinks": "sinks per query are not computed, those per head are `s_aux`",
}


def _expect_taken(dropout, options):
    if dropout:
        raise _argument_error("dropout", dropout, "0, regard is for inference only")
    for name, reason in _NOT_TAKEN.items():
        if options.get(name) is not None:
            raise _argument_error(name, "given", f"None, {reason}")


def _unit_stride(x):
    """x, copied if neighbours in its last dimension are not neighbours in memory (an expanded mask)."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def _added(position_bias, attention_mask):
    """The addend of scores: the bias, and -inf where the mask hides a key."""
    if attention_mask is None:
        return position_bias
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, position_bias, float("-inf"))
    return position_bias + attention_mask


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
    position_bias=None,
    indices=None,
    **options,
):
    """transformers' attention function: the result is [B, Lq, Hq, D], and None for the weights.

    query, key, value: [B, Hq, Lq, D] and [B, Hkv, Lk, D].
    attention_mask: [B, Hq, Lq, Lk], any of them 1: boolean (true where a key is seen) or added to scores. None:
        with `is_causal` the queries are the last ones of the keys, and see `sliding_window` keys.
    scaling: multiplies scores; 1 / sqrt(D) if None.
    softcap: scores become cap * tanh(score / cap).
    s_aux: [Hq]: one more logit in each head's denominator (sinks, gpt-oss).
    position_bias: added to scores, of the shape of a mask (T5).
    indices: integers [B, Lq, n]: the keys that each query attends to (DeepSeek sparse attention).

    `ArgumentError` is raised for dropout, and for arguments that would change the result and are not taken.
    """
    _expect_taken(dropout, options)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    choices = dict(scale=scaling, softcap=softcap, sinks=None if s_aux is None else s_aux.float())
    if attention_mask is None and is_causal:
        choices["causal"] = True
        if sliding_window is not None:
            choices["window"] = (sliding_window - 1, None)
    added = attention_mask if position_bias is None else _added(position_bias, attention_mask)
    if added is not None:
        choices["mask"] = _unit_stride(added)
    if indices is not None:
        choices["key_indices"] = indices.to(torch.int32).flatten(0, 1).unsqueeze(1)
    # A transposed view: the result is contiguous as [B, Lq, Hq, D], which the model wants next.
    arguments = [_unit_stride(x).transpose(1, 2) for x in (query, key, value)]
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return regard.torch.attention(*arguments, **choices), None
    return regard.attention(*arguments, **choices), None
