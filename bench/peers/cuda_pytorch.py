"""PyTorch's scaled_dot_product_attention on an NVIDIA GPU, each of its kernels by itself: FlashAttention 2, cuDNN, memory-efficient. At
decode also with the query heads of a group folded into query rows, which some of them are faster with."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import cuda_common as common

KERNELS = {
    "FlashAttention 2": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def ways(name, backend, q, k, v):
    """Ways to call one kernel on one shape: what it is called, and a function of keys and values."""
    batch, heads, kv_heads, dim, queries, keys, causal = common.SHAPES[name]
    square = causal and queries == keys
    mask = causal_lower_right(queries, keys) if causal and not square else None
    grouped = heads != kv_heads

    def plain(k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square, enable_gqa=grouped)

    if backend == SDPBackend.EFFICIENT_ATTENTION:
        # It has no groups: keys and values are repeated before the clock runs.
        if queries <= common.ROTATED_TOKENS or keys > 8192:
            return
        repeat = lambda x: x.repeat_interleave(heads // kv_heads, 1)
        yield "", lambda k, v: F.scaled_dot_product_attention(q, k, v, is_causal=square), repeat
        return
    yield "", plain, lambda x: x
    if queries == 1 and grouped:
        folded = q.view(batch, kv_heads, heads // kv_heads, dim)
        yield " folded", lambda k, v: F.scaled_dot_product_attention(folded, k, v).view(q.shape), lambda x: x


def main():
    options = common.arguments(__doc__)
    torch.manual_seed(0)
    common.ceilings()
    version = torch.__version__.split("+")[0]
    results = []
    with torch.inference_mode():
        for name in options.names:
            batch, heads, kv_heads, dim, queries, keys, _ = common.SHAPES[name]
            for dtype in options.dtype:
                kind = common.DTYPES[dtype]
                q = torch.randn(batch, heads, queries, dim, dtype=kind, device="cuda")
                pairs = [
                    tuple(torch.randn(batch, kv_heads, keys, dim, dtype=kind, device="cuda") for _ in range(2))
                    for _ in range(common.copies(name, dtype))
                ]
                for kernel, backend in KERNELS.items():
                    for way, function, prepare in ways(name, backend, q, *pairs[0]):
                        peer = f"PyTorch {version} {kernel}{way}"
                        try:
                            with sdpa_kernel(backend):
                                prepared = [(prepare(k), prepare(v)) for k, v in pairs]
                                out = function(*prepared[0])
                                error = common.largest_error(name, q, *pairs[0], out)
                                timing = common.measure(options, [lambda k=k, v=v: function(k, v) for k, v in prepared])
                        except RuntimeError as refused:
                            print(f"{peer:36} {name:22} {dtype:5} refused: {str(refused).splitlines()[0][:90]}", flush=True)
                            continue
                        results.append(common.record(peer, name, "", dtype, timing, error))
                del pairs
    common.write(options, results)


main()
