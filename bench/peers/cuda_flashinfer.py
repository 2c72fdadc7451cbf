"""FlashInfer over pages of 16 slots in random order, on the decode shapes: with and without matrix units. It compiles its kernels at first use:
the seconds that takes are printed."""

import time

import flashinfer
import torch

import cuda_common as common

PAGE = 16


def main():
    options = common.arguments(__doc__)
    torch.manual_seed(0)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    results = []
    for name in options.names:
        batch, heads, kv_heads, dim, queries, keys, _ = common.SHAPES[name]
        if queries > 1 or keys % PAGE or dim > 256:
            continue
        pages = keys // PAGE
        for dtype in options.dtype:
            kind = common.DTYPES[dtype]
            caches = [
                torch.randn(batch * pages, 2, PAGE, kv_heads, dim, dtype=kind, device="cuda")
                for _ in range(common.copies(name, dtype))
            ]
            q = torch.randn(batch, heads, dim, dtype=kind, device="cuda")
            order = torch.randperm(batch * pages, device="cuda").to(torch.int32)
            starts = torch.arange(0, batch * pages + 1, pages, dtype=torch.int32, device="cuda")
            last = torch.full((batch,), PAGE, dtype=torch.int32, device="cuda")
            for units in (False, True):
                peer = f"FlashInfer {flashinfer.__version__}{' matrix units' if units else ''}"
                try:
                    began = time.perf_counter()
                    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=units)
                    wrapper.plan(starts, order, last, heads, kv_heads, dim, PAGE, q_data_type=kind, kv_data_type=kind)
                    out = wrapper.run(q, caches[0])
                    torch.cuda.synchronize()
                    print(f"{peer} {name}: {time.perf_counter() - began:.1f} s to its first result")
                    # [batch, pages, 2, slot, head, dim] to keys and values [batch, head, key, dim].
                    cache = caches[0][order.long()].view(batch, pages, 2, PAGE, kv_heads, dim)
                    k, v = (cache[:, :, i].reshape(batch, keys, kv_heads, dim).transpose(1, 2) for i in (0, 1))
                    error = common.largest_error(name, q.unsqueeze(2), k, v, out.unsqueeze(2))
                    timing = common.measure(options, [lambda cache=cache: wrapper.run(q, cache) for cache in caches])
                except RuntimeError as refused:
                    print(f"{peer} {name} {dtype} refused: {str(refused).splitlines()[0][:90]}", flush=True)
                    continue
                results.append(common.record(peer, name, f"page={PAGE}", dtype, timing, error))
            del caches
    common.write(options, results)


main()
