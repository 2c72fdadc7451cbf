"""regard's functions as operators of PyTorch: `torch.compile` and CUDA graphs see one operator.

`regard.attention` and the others take tensors too; these are for programs that are traced or compiled.
The operators have fake (meta) implementations and compute no gradients: a backward pass raises. They run
on PyTorch's current stream. Wrong arguments raise the errors of `regard`, in the same words, when an
operator runs; PyTorch itself refuses names and types that are not in an operator's schema.
"""

from __future__ import annotations

import torch
from torch import Tensor

import regard

__all__ = ["append", "append_latent", "attention", "attention_with_lse", "copy_blocks", "merge"]

_INFERENCE_ONLY = (
    "regard computes inference only, no gradients: call it under torch.inference_mode() or "
    "torch.no_grad(), or detach its inputs"
)


def _operator(name, schema, mutates=()):
    schema = " ".join(schema.split())
    return torch.library.custom_op(f"regard::{name}", mutates_args=mutates, device_types=("cpu", "cuda"), schema=schema)


def _no_gradient(ctx, *gradients):
    raise RuntimeError(_INFERENCE_ONLY)


def _nothing(*args, **options):
    """The fake implementation of an operator that only writes its arguments."""


def _argument_error(argument, found, allowed):
    """An `ArgumentError` as the compiled part raises them."""
    error = regard.ArgumentError(f"`{argument}` is {found}; allowed: {allowed}")
    error.argument, error.found, error.allowed = argument, found, allowed
    return error


def _optional(names):
    return ", ".join(f"Tensor? {name}=None" for name in names)


# The options of attention. PyTorch gives tensors to an implementation by place, and all others by name.
_TENSORS = (
    *("q_offsets", "key_offsets", "mask", "alibi_slopes", "sinks", "tree_mask"),
    *("kv_lens", "cu_seqlens_q", "cu_seqlens_k", "block_table", "k_scales", "v_scales", "rotary_k"),
    *("key_indices", "key_counts", "page_indices", "page_list_lens", "page_numbers"),
    *("second_k", "second_v", "second_k_scales", "second_v_scales", "second_indices", "second_counts"),
    *("prefix_groups", "prefix_lens"),
)
_NUMBERS = """
    float? scale=None, bool causal=False, SymInt? window_left=None, SymInt? window_right=None,
    SymInt? chunk=None, float? softcap=None, SymInt? q_offset=None, SymInt? key_offset=None,
    SymInt? key_stride=None, SymInt? value_dim=None, str? k_format=None, str? v_format=None,
    bool indices_are_slots=False, bool batch_invariant=False, str layout="bshd", str kv_layout="nhd",
    SymInt? max_query_len=None, SymInt? max_kv_len=None, ScalarType? out_dtype=None, int? threads=None
"""
_ATTENTION = f"Tensor q, Tensor k, Tensor? v, {_optional(_TENSORS)}, *, {_NUMBERS}"


def _run(q, k, v, tensors, options, **results):
    options.update(zip(_TENSORS, tensors))
    for name in ("q_offset", "key_offset"):
        per_sequence = options.pop(f"{name}s", None)
        if per_sequence is not None:
            options[name] = per_sequence
    window = options.pop("window_left", None), options.pop("window_right", None)
    # The operator's autograd kernel has detached its inputs already; parameters still show that they
    # require gradients.
    with torch.no_grad():
        return regard.attention(q, k, v, window=window, **options, **results)


_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18}


def _new_out(q, v, v_format=None, value_dim=None, out_dtype=None, **others):
    """An output without contents, as `regard.attention` makes it."""
    if v is not None:
        bytes_per_block = _BLOCK_BYTES.get(v_format)
        value_dim = v.shape[-1] if bytes_per_block is None else v.shape[-1] // bytes_per_block * 32
    elif value_dim is None:
        value_dim = q.shape[-1]  # The operator refuses this when it runs.
    return q.new_empty((*q.shape[:-1], value_dim), dtype=q.dtype if out_dtype is None else out_dtype)


def _new_lse(q):
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


@_operator("attention", f"({_ATTENTION}) -> Tensor")
def _attention(q, k, v, *tensors, **options):
    return _run(q, k, v, tensors, options)


@_attention.register_fake
def _(q, k, v, *tensors, **options):
    return _new_out(q, v, **options)


@_operator("attention_with_lse", f"({_ATTENTION}) -> (Tensor, Tensor)")
def _attention_with_lse(q, k, v, *tensors, **options):
    return _run(q, k, v, tensors, options, lse=True)


@_attention_with_lse.register_fake
def _(q, k, v, *tensors, **options):
    return _new_out(q, v, **options), _new_lse(q)


# `written` is out, or out and lse: PyTorch takes no optional tensors that are written.
@_operator("attention_out", f"(Tensor(a!)[] written, {_ATTENTION}) -> ()", mutates=("written",))
def _attention_out(written, q, k, v, *tensors, **options):
    _run(q, k, v, tensors, options, **dict(zip(("out", "lse"), written)))


_attention_out.register_fake(_nothing)
torch.library.register_autograd("regard::attention", _no_gradient)
torch.library.register_autograd("regard::attention_with_lse", _no_gradient)


def _refuse_gradients(*tensors):
    """For operators that write their arguments, for which PyTorch registers no backward pass."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(_INFERENCE_ONLY)


def _spread_format(options, names=("k_format", "v_format")):
    both = options.pop("kv_format", None)
    for name in names:
        if both is not None and options.get(name) is None:
            options[name] = both


_DTYPES = {
    **dict.fromkeys(("f32", "float32"), torch.float32),
    **dict.fromkeys(("f16", "float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
}


def _of_operator(options):
    """The options of `regard.attention` as the operators take them."""
    window = options.pop("window", None)
    if window is not None:
        options["window_left"], options["window_right"] = window
    for name in ("q_offset", "key_offset"):
        if isinstance(options.get(name), Tensor):
            options[f"{name}s"] = options.pop(name)
    _spread_format(options)
    dtype = options.get("out_dtype")
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise _argument_error("out_dtype", repr(dtype), '"f32", "f16" or "bf16"')
        options["out_dtype"] = _DTYPES[dtype]
    return options


def attention(q, k, v, *, out=None, **options):
    """Attention of q over k and v, as `regard.attention`: the operator `regard::attention`.

    q: float32, float16 or bfloat16 `[B, Lq, Hq, Dk]` (`layout="bhsd"`: heads before tokens), or
        `[total, Hq, Dk]` with `cu_seqlens_q`.
    k, v: `[B, Lk, Hkv, Dk]` and `[B, Lk, Hkv, Dv]`, or as the options say; v is None with `value_dim`.
    out: where the result goes: `[B, Lq, Hq, Dv]` of q's type or float32. It is returned (the operator
        `regard::attention_out`).

    The other options are those of `regard.attention` (`help(regard.attention)` has shapes and units), but
    `lse` (see `attention_with_lse`) and `stream` (the work is queued on PyTorch's current one). Arrays are
    tensors, not lists. `q_offset` and `key_offset` are numbers, or tensors of int32 `[B]` for offsets of
    each sequence: other contents of a tensor do not compile anew.

    Returns `[B, Lq, Hq, Dv]` of q's type, or of `out_dtype`. Errors are those of `regard.attention`; a
    backward pass raises RuntimeError, and so does `out` if an input requires gradients that are recorded.
    """
    options = _of_operator(options)
    if out is None:
        return _attention(q, k, v, **options)
    _refuse_gradients(q, k, v)
    _attention_out([out], q, k, v, **options)
    return out


def attention_with_lse(q, k, v, *, out=None, lse=None, **options):
    """`attention`, and the log-sum-exp of each row: the operator `regard::attention_with_lse`.

    out: as for `attention`.
    lse: where the log-sum-exp goes: float32 `[B, Lq, Hq]`.

    Returns (out, lse). lse is the natural logarithm of each row's softmax denominator, -inf for a row that
    sees no key. If one of the two is given, the other is new.
    """
    options = _of_operator(options)
    if out is None and lse is None:
        return _attention_with_lse(q, k, v, **options)
    _refuse_gradients(q, k, v)
    out = _new_out(q, v, **options) if out is None else out
    lse = _new_lse(q) if lse is None else lse
    _attention_out([out, lse], q, k, v, **options)
    return out, lse


# Tensors that appends write are a list with its names: PyTorch takes no optional tensors that are written.
_WRITTEN = "Tensor(a!)[] written, str names, Tensor block_table, Tensor kv_lens"
_LATENT_TENSORS = ("cu_seqlens", "rotary_table", "k_scales")
_LATENT_NUMBERS = 'bool interleaved=False, bool dynamic_k_scales=False, str? k_format=None, str kv_layout="nhd"'
_APPEND_TENSORS = (*_LATENT_TENSORS, "v_scales")
_APPEND_NUMBERS = f"{_LATENT_NUMBERS}, bool dynamic_v_scales=False, str? v_format=None"
_APPEND = f"(Tensor key, Tensor value, {_WRITTEN}, {_optional(_APPEND_TENSORS)}, *, {_APPEND_NUMBERS}) -> ()"
_APPEND_LATENT = f"(Tensor key, {_WRITTEN}, {_optional(_LATENT_TENSORS)}, *, {_LATENT_NUMBERS}) -> ()"


@_operator("append", _APPEND, mutates=("written",))
def _append(key, value, written, names, block_table, kv_lens, *tensors, **options):
    options.update(zip(_APPEND_TENSORS, tensors))
    options.update(zip(names.split(), written))
    with torch.no_grad():
        regard.append(key, value, block_table=block_table, kv_lens=kv_lens, **options)


@_operator("append_latent", _APPEND_LATENT, mutates=("written",))
def _append_latent(key, written, names, block_table, kv_lens, *tensors, **options):
    options.update(zip(_LATENT_TENSORS, tensors))
    options.update(zip(names.split(), written))
    with torch.no_grad():
        regard.append_latent(key, block_table=block_table, kv_lens=kv_lens, **options)


_append.register_fake(_nothing)
_append_latent.register_fake(_nothing)


def _written(options, **tensors):
    """The tensors that an append writes and their names; scales are among them if it computes them."""
    for name in ("k_scales", "v_scales"):
        if options.get(f"dynamic_{name}"):
            tensors[name] = options.pop(name, None)
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return list(tensors.values()), " ".join(tensors)


def append(key, value, key_pool, value_pool, block_table, kv_lens, *, query=None, **options):
    """Writes new keys and values to a paged cache, as `regard.append`: the operator `regard::append`.

    key, value: `[total, Hkv, Dk]` and `[total, Hkv, Dv]`.
    key_pool, value_pool: `[blocks, block_size, Hkv, D]`; written.
    block_table: int32 `[B, max_blocks]`.
    kv_lens: int32 `[B]`, the new tokens included.
    query: `[total, Hq, Dk]`, rotated in place with `rotary_table`.

    The other options are those of `regard.append` but `stream`. `k_scales` and `v_scales` are written with
    `dynamic_k_scales` and `dynamic_v_scales`. Errors are those of `regard.append`; nothing is written then.
    Gradients do not pass through a cache.
    """
    _spread_format(options)
    written = _written(options, key_pool=key_pool, value_pool=value_pool, query=query)
    _append(key, value, *written, block_table, kv_lens, **options)


def append_latent(key, key_pool, block_table, kv_lens, *, query=None, **options):
    """Writes new rows to a paged latent cache (MLA), as `regard.append_latent`: the operator
    `regard::append_latent`.

    key: `[total, Hkv, Dk]`.
    key_pool: `[blocks, block_size, Hkv, Dk]` (`kv_format="mla656"`: bytes, the last dimension 656); written.
    block_table, kv_lens: as for `append`.
    query: `[total, Hq, Dk]`, whose last dims are rotated in place with `rotary_table`.

    The other options are those of `regard.append_latent` but `stream`. `k_scales` are written with
    `dynamic_k_scales`. Errors are those of `regard.append_latent`; nothing is written then.
    """
    _spread_format(options, names=("k_format",))
    written = _written(options, key_pool=key_pool, query=query)
    _append_latent(key, *written, block_table, kv_lens, **options)


def _new_merged(parts):
    return parts.new_empty(parts.shape[1:]), parts.new_empty(parts.shape[1:-1], dtype=torch.float32)


@_operator("merge", "(Tensor parts, Tensor part_lse) -> (Tensor, Tensor)")
def _merge(parts, part_lse):
    with torch.no_grad():
        return regard.merge(parts, part_lse)


@_merge.register_fake
def _(parts, part_lse):
    return _new_merged(parts)


@_operator("merge_out", "(Tensor(a!) out, Tensor(b!) lse, Tensor parts, Tensor part_lse) -> ()", mutates=("out", "lse"))
def _merge_out(out, lse, parts, part_lse):
    with torch.no_grad():
        regard.merge(parts, part_lse, out=out, lse=lse)


_merge_out.register_fake(_nothing)
torch.library.register_autograd("regard::merge", _no_gradient)


def merge(parts, part_lse, *, out=None, lse=None):
    """Merges outputs over disjoint sets of keys, as `regard.merge`: the operator `regard::merge`.

    parts: float32, float16 or bfloat16 `[parts, ..., dim]`: each part's output.
    part_lse: float32 `[parts, ...]`, natural logarithms; -inf for a part that saw no key, whose output is
        not looked at.
    out: where the result goes, `[..., dim]` of a floating type; lse likewise, float32 `[...]` (the operator
        `regard::merge_out`).

    Returns (out, lse); what is not given is new, out of the type of parts. Errors are those of
    `regard.merge`; a backward pass raises RuntimeError, and so do `out` and `lse` if an input requires
    gradients that are recorded.
    """
    if out is None and lse is None:
        return _merge(parts, part_lse)
    _refuse_gradients(parts, part_lse)
    new_out, new_lse = _new_merged(parts)
    out, lse = new_out if out is None else out, new_lse if lse is None else lse
    _merge_out(out, lse, parts, part_lse)
    return out, lse


@_operator("copy_blocks", "(Tensor(a!)[] pools, Tensor copies, *, str? kv_layout=None) -> ()", mutates=("pools",))
def _copy_blocks(pools, copies, *, kv_layout=None):
    with torch.no_grad():
        regard.copy_blocks(pools, [tuple(copy) for copy in copies.tolist()], kv_layout=kv_layout)


_copy_blocks.register_fake(_nothing)


def copy_blocks(pools, copies, *, kv_layout=None):
    """Copies blocks of pools, as `regard.copy_blocks`: the operator `regard::copy_blocks`.

    pools: a list of tensors `[blocks, block_size, ...]`: keys, values and scales of all layers; written.
    copies: (from block, to block, slots): the first slots of a block go to another, one copy after the
        other. A list, as `Step.copies` is, or an integer tensor `[copies, 3]` on the CPU. A compiled
        function should get the tensor: it compiles anew for another list.
    kv_layout: "nhd", or "hnd" if pools have heads before slots.

    A CUDA graph replays the copies that it has captured. Errors are those of `regard.copy_blocks`.
    """
    if not isinstance(copies, Tensor):
        copies = torch.tensor(copies, dtype=torch.int64).reshape(-1, 3)
    _copy_blocks(pools, copies, kv_layout=kv_layout)
