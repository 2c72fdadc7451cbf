"""PyTorch on the shapes of `regard bench`: scaled_dot_product_attention as it dispatches by itself, and attention as two matrix
products with a softmax between them, the query heads of a group folded into one product."""

import torch
import torch.nn.functional as F

import common

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def unfused(q, k, v, hidden):
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    group = heads // kv_heads
    scores = torch.matmul(q.reshape(batch, kv_heads, group * queries, dim), k.transpose(-1, -2)) * dim**-0.5
    if hidden is not None:
        scores.view(batch, kv_heads, group, queries, keys).masked_fill_(hidden, float("-inf"))
    return torch.matmul(torch.softmax(scores, -1), v).view(batch, heads, queries, dim)


def main():
    options = common.arguments(__doc__, "f32,bf16,f16")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    with torch.inference_mode():
        for name in options.names:
            batch, heads, kv_heads, dim, queries, keys, causal = common.SHAPES[name]
            for dtype in options.dtype:
                kind = DTYPES[dtype]
                q = torch.randn(batch, queries, heads, dim, dtype=kind).transpose(1, 2)
                k, v = (torch.randn(batch, kv_heads, keys, dim, dtype=kind) for _ in range(2))
                pairs = [(k, v)] + [(k.clone(), v.clone()) for _ in range(common.copies(name, dtype) - 1)]
                square = causal and queries == keys
                kept = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else None
                hidden = None if kept is None else kept.logical_not()

                def fused(k, v):
                    mask = None if square else kept
                    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square, enable_gqa=heads != kv_heads)

                for peer, function in (("PyTorch SDPA", fused), ("PyTorch unfused", lambda k, v: unfused(q, k, v, hidden))):
                    out = function(k, v).transpose(1, 2).float().numpy()
                    error = common.largest_error(name, q.transpose(1, 2).float().numpy(), k.float().numpy(), v.float().numpy(), out)
                    calls = [lambda k=k, v=v: function(k, v) for k, v in pairs]
                    timing = common.measure(options, calls)
                    results.append(common.record(options, f"{peer} {torch.__version__.split('+')[0]}", name, dtype, timing, error))
    common.write(options, results)


main()
