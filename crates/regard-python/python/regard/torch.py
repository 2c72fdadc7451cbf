"""regard's attention as operators of PyTorch: `torch.compile` and CUDA graphs see one operator.

`regard.attention` takes tensors too; these operators are for programs that are traced or compiled. They
have fake (meta) implementations and compute no gradients: a backward pass raises.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

import regard

__all__ = ["append", "attention", "attention_with_lse"]

_INFERENCE_ONLY = (
    "regard computes inference only, no gradients: call it under torch.inference_mode() or "
    "torch.no_grad(), or detach its inputs"
)


def _run(q, k, v, lse, options):
    options = {name: value for name, value in options.items() if value is not None}
    left, right = options.pop("window_left", None), options.pop("window_right", None)
    # The operator's autograd kernel has detached its inputs already; parameters still show that they
    # require gradients.
    with torch.no_grad():
        return regard.attention(q, k, v, lse=lse, window=(left, right), **options)


# The options of the operators that the result's shape depends on, and how many come before them.
_OPTIONS_OF_SHAPE = {"v_format": 25, "value_dim": 26}
_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18}


def _out_like(q: Tensor, v: Optional[Tensor], args, options) -> Tensor:
    places = _OPTIONS_OF_SHAPE.items()
    v_format, dim = (args[place] if place < len(args) else options.get(name) for name, place in places)
    if v is not None:
        bytes_per_block = _BLOCK_BYTES.get(v_format)
        dim = v.shape[-1] if bytes_per_block is None else v.shape[-1] // bytes_per_block * 32
    return q.new_empty((*q.shape[:-1], dim))


@torch.library.custom_op("regard::attention", mutates_args=(), device_types=("cpu", "cuda"))
def _attention(
    q: Tensor,
    k: Tensor,
    v: Optional[Tensor],
    scale: Optional[float] = None,
    causal: bool = False,
    window_left: Optional[int] = None,
    window_right: Optional[int] = None,
    chunk: Optional[int] = None,
    softcap: Optional[float] = None,
    q_offset: Optional[int] = None,
    mask: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    kv_lens: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    k_scales: Optional[Tensor] = None,
    v_scales: Optional[Tensor] = None,
    key_indices: Optional[Tensor] = None,
    key_counts: Optional[Tensor] = None,
    prefix_groups: Optional[Tensor] = None,
    prefix_lens: Optional[Tensor] = None,
    indices_are_slots: bool = False,
    batch_invariant: bool = False,
    layout: str = "bshd",
    kv_layout: str = "nhd",
    k_format: Optional[str] = None,
    v_format: Optional[str] = None,
    value_dim: Optional[int] = None,
    key_offset: Optional[int] = None,
    key_stride: Optional[int] = None,
    page_indices: Optional[Tensor] = None,
    page_list_lens: Optional[Tensor] = None,
    page_numbers: Optional[Tensor] = None,
    second_k: Optional[Tensor] = None,
    second_v: Optional[Tensor] = None,
    second_k_scales: Optional[Tensor] = None,
    second_v_scales: Optional[Tensor] = None,
    second_indices: Optional[Tensor] = None,
    second_counts: Optional[Tensor] = None,
    rotary_k: Optional[Tensor] = None,
) -> Tensor:
    options = dict(locals())
    return _run(options.pop("q"), options.pop("k"), options.pop("v"), False, options)


@_attention.register_fake
def _(q, k, v, *args, **options):
    return _out_like(q, v, args, options)


@torch.library.custom_op("regard::attention_with_lse", mutates_args=(), device_types=("cpu", "cuda"))
def _attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Optional[Tensor],
    scale: Optional[float] = None,
    causal: bool = False,
    window_left: Optional[int] = None,
    window_right: Optional[int] = None,
    chunk: Optional[int] = None,
    softcap: Optional[float] = None,
    q_offset: Optional[int] = None,
    mask: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    kv_lens: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    k_scales: Optional[Tensor] = None,
    v_scales: Optional[Tensor] = None,
    key_indices: Optional[Tensor] = None,
    key_counts: Optional[Tensor] = None,
    prefix_groups: Optional[Tensor] = None,
    prefix_lens: Optional[Tensor] = None,
    indices_are_slots: bool = False,
    batch_invariant: bool = False,
    layout: str = "bshd",
    kv_layout: str = "nhd",
    k_format: Optional[str] = None,
    v_format: Optional[str] = None,
    value_dim: Optional[int] = None,
    key_offset: Optional[int] = None,
    key_stride: Optional[int] = None,
    page_indices: Optional[Tensor] = None,
    page_list_lens: Optional[Tensor] = None,
    page_numbers: Optional[Tensor] = None,
    second_k: Optional[Tensor] = None,
    second_v: Optional[Tensor] = None,
    second_k_scales: Optional[Tensor] = None,
    second_v_scales: Optional[Tensor] = None,
    second_indices: Optional[Tensor] = None,
    second_counts: Optional[Tensor] = None,
    rotary_k: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    options = dict(locals())
    return _run(options.pop("q"), options.pop("k"), options.pop("v"), True, options)


@_attention_with_lse.register_fake
def _(q, k, v, *args, **options):
    return _out_like(q, v, args, options), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _no_gradient(ctx, *gradients):
    raise RuntimeError(_INFERENCE_ONLY)


torch.library.register_autograd("regard::attention", _no_gradient)
torch.library.register_autograd("regard::attention_with_lse", _no_gradient)


def _spread_format(options: dict) -> None:
    both = options.pop("kv_format", None)
    if both is not None:
        options.setdefault("k_format", both)
        options.setdefault("v_format", both)


def attention(q: Tensor, k: Tensor, v: Optional[Tensor], *, window=None, **options) -> Tensor:
    """Attention of q over k and v, as `regard.attention`, as the operator `regard::attention`.

    q is [B, Lq, Hq, Dk], k [B, Lk, Hkv, Dk], v [B, Lk, Hkv, Dv] (`layout="bhsd"`: heads before tokens);
    the result is [B, Lq, Hq, Dv] of q's type. Options are those of `regard.attention` but `out`, `lse`,
    `stream`, `threads`, `out_dtype` and tree masks; `q_offset` and `key_offset` are numbers. `kv_format` sets `k_format`
    and `v_format`.
    """
    left, right = window if window is not None else (None, None)
    _spread_format(options)
    return _attention(q, k, v, window_left=left, window_right=right, **options)


def attention_with_lse(q: Tensor, k: Tensor, v: Optional[Tensor], *, window=None, **options) -> Tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each row: float32 [B, Lq, Hq], natural logarithm."""
    left, right = window if window is not None else (None, None)
    _spread_format(options)
    return _attention_with_lse(q, k, v, window_left=left, window_right=right, **options)


# PyTorch takes no optional tensors that are written, so these are a list, with their names.
@torch.library.custom_op("regard::append", mutates_args=("written",), device_types=("cpu", "cuda"))
def _append(
    key: Tensor,
    value: Tensor,
    written: List[Tensor],
    names: str,
    block_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Optional[Tensor] = None,
    rotary_table: Optional[Tensor] = None,
    interleaved: bool = False,
    k_scales: Optional[Tensor] = None,
    v_scales: Optional[Tensor] = None,
    k_format: Optional[str] = None,
    v_format: Optional[str] = None,
    kv_layout: str = "nhd",
) -> None:
    options = dict(locals())
    written = dict(zip(options.pop("names").split(), options.pop("written")))
    computed = {f"dynamic_{name}": True for name in ("k_scales", "v_scales") if name in written}
    with torch.no_grad():
        regard.append(**{**options, **written, **computed})


@_append.register_fake
def _(*args, **options):
    return None


def append(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    *,
    query: Optional[Tensor] = None,
    dynamic_k_scales: bool = False,
    dynamic_v_scales: bool = False,
    **options,
) -> None:
    """`regard.append` as the operator `regard::append`, so that a compiled step writes its cache.

    Options are those of `regard.append` but `stream`.
    """
    _spread_format(options)
    written = {"key_pool": key_pool, "value_pool": value_pool}
    if query is not None:
        written["query"] = query
    for name, dynamic in (("k_scales", dynamic_k_scales), ("v_scales", dynamic_v_scales)):
        if dynamic and options.get(name) is not None:
            written[name] = options.pop(name)
    _append(key, value, list(written.values()), " ".join(written), block_table, kv_lens, **options)
