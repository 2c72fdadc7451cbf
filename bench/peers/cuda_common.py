"""Code that the peers' scripts for NVIDIA GPUs share: the shapes of `regard bench --device cuda`, its timing rules (launches over rotating operands,
recorded in a graph, between two events) and its result file. Needs torch with CUDA."""

import argparse
import json
import math
import statistics
import time

import torch

# name: (batch, query heads, key/value heads, head dim, query length, key length, causal)
SHAPES = {
    "d4k": (1, 32, 8, 128, 1, 4096, False),
    "d32k": (1, 32, 8, 128, 1, 32768, False),
    "d128k": (1, 32, 8, 128, 1, 131072, False),
    "d4kb8": (8, 32, 8, 128, 1, 4096, False),
    "d8kb64": (64, 32, 8, 128, 1, 8192, False),
    "d1kb128": (128, 32, 8, 128, 1, 1024, False),
    "d32kh64": (1, 64, 8, 128, 1, 32768, False),
    "d16kmha": (1, 32, 32, 128, 1, 16384, False),
    "d16kb16d64": (16, 32, 4, 64, 1, 16384, False),
    "d16kb8d256": (8, 16, 8, 256, 1, 16384, False),
    "d16kb8d512": (8, 8, 4, 512, 1, 16384, False),
    "d2kd64": (1, 9, 3, 64, 1, 2048, False),
    "v8": (1, 32, 8, 128, 8, 4096, True),
    "v8d32k": (1, 32, 8, 128, 8, 32768, True),
    "v8b8": (8, 32, 8, 128, 8, 4096, True),
    "v8b64": (64, 32, 8, 128, 8, 8192, True),
    "p2048": (1, 32, 8, 128, 2048, 2048, True),
    "p512": (1, 32, 8, 128, 512, 512, True),
    "p1024d64": (1, 9, 3, 64, 1024, 1024, True),
    "enc512": (1, 12, 12, 64, 512, 512, False),
    "p1024d256": (1, 16, 8, 256, 1024, 1024, True),
}
# p: causal, f: full.
for dim, heads, kv_heads, suffix in ((64, 32, 8, "d64"), (128, 32, 8, ""), (256, 16, 8, "d256")):
    for batch, length, name in ((32, 512, "512b32"), (8, 2048, "2048b8"), (2, 8192, "8192b2"), (1, 16384, "16k")):
        SHAPES[f"p{name}{suffix}"] = (batch, heads, kv_heads, dim, length, length, True)
        SHAPES[f"f{name}{suffix}"] = (batch, heads, kv_heads, dim, length, length, False)
SHAPES["p2048b8d512"] = (8, 8, 4, 512, 2048, 2048, True)
SHAPES["f2048b8d512"] = (8, 8, 4, 512, 2048, 2048, False)
SHAPES["p8192b2d512"] = (2, 8, 4, 512, 8192, 8192, True)
SHAPES["f8192b2d512"] = (2, 8, 4, 512, 8192, 8192, False)

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ROTATED_BYTES = 400_000_000
ROTATED_TOKENS = 16
GRAPH_SECONDS = 8e-3


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help="shapes to run (all)")
    parser.add_argument("--dtype", default="bf16", help="types of operands (bf16)")
    parser.add_argument("--seconds", type=float, default=0.2, help="run each shape for so long,")
    parser.add_argument("--repeat", type=int, default=5, help="minimum number of runs")
    parser.add_argument("--out", required=True, help="the result file to write")
    parsed = parser.parse_args()
    unknown = [name for name in parsed.names if name not in SHAPES]
    if unknown:
        parser.error(f"no shape {unknown[0]}; there are {', '.join(SHAPES)}")
    parsed.names = parsed.names or list(SHAPES)
    parsed.dtype = parsed.dtype.split(",")
    return parsed


def kv_bytes(name, dtype):
    batch, _, kv_heads, dim, _, keys, _ = SHAPES[name]
    return 2 * batch * kv_heads * keys * dim * DTYPES[dtype].itemsize


def copies(name, dtype):
    """Copies of keys and values to rotate over, so that no run finds them in a cache."""
    if SHAPES[name][4] > ROTATED_TOKENS:
        return 1
    return -(-ROTATED_BYTES // kv_bytes(name, dtype))


def flops(name):
    batch, heads, _, dim, queries, keys, causal = SHAPES[name]
    square = causal and queries == keys
    pairs = queries * keys / 2 if square else sum(keys - queries + i + 1 for i in range(queries)) if causal else queries * keys
    return 4 * batch * heads * dim * pairs


def seconds(call):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(options, calls):
    """Median and spread of these calls, taken in turn inside one graph."""
    def all_calls(rounds=1):
        for _ in range(rounds):
            for call in calls:
                call()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        all_calls()
        all_calls()
    torch.cuda.synchronize()
    one = seconds(all_calls) / len(calls)
    rounds = min(max(1, math.ceil(GRAPH_SECONDS / one / len(calls))), max(1, 8192 // len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_calls(rounds)
    count = rounds * len(calls)
    for _ in range(3):
        graph.replay()
    times, begin = [], time.perf_counter()
    while time.perf_counter() - begin < options.seconds or len(times) < options.repeat:
        times.append(seconds(graph.replay) / count)
    times.sort()
    return {
        "seconds": statistics.median_low(times),
        "fastest": times[0],
        "quartiles": [times[len(times) // 4], times[len(times) * 3 // 4]],
        "runs": len(times),
    }


def record(peer, name, variant, dtype, timing, max_error):
    full_name = f"{name} {variant}" if variant else name
    result = {
        "name": full_name,
        "base": name,
        "query_tokens": SHAPES[name][4],
        "peer": peer,
        "device": "cuda",
        "machine": torch.cuda.get_device_name(),
        "threads": 0,
        "dtype": dtype,
        "copies": copies(name, dtype),
        **timing,
        "gflops": flops(name) / timing["seconds"] / 1e9,
        "gbytes_per_second": kv_bytes(name, dtype) / timing["seconds"] / 1e9,
        "max_error": max_error,
    }
    print(
        f"{peer:36} {full_name:22} {dtype:5} {timing['seconds'] * 1e6:10.2f} us {result['gflops']:10.1f} GFLOP/s "
        f"{result['gbytes_per_second']:8.1f} GB/s  error {max_error:.1e}",
        flush=True,
    )
    return result


def largest_error(name, q, k, v, out):
    """Against f64 on a few rows. q and out are [batch, heads, queries, dim], k and v [batch, heads, keys, dim]."""
    batch, heads, kv_heads, dim, queries, keys, causal = SHAPES[name]
    worst = 0.0
    for b in {0, batch - 1}:
        for head in {0, heads // 2, heads - 1}:
            kv_head = head // (heads // kv_heads)
            for row in {0, queries // 3, queries - 1}:
                end = keys - queries + row + 1 if causal else keys
                key, value = (x[b, kv_head, :end].double() for x in (k, v))
                weight = torch.softmax(key @ q[b, head, row].double() / dim**0.5, 0)
                worst = max(worst, (weight @ value - out[b, head, row].double()).abs().max().item())
    return worst


def ceilings():
    """Printed for comparison; `regard bench` measures its own."""
    x = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    y.copy_(x)
    print(f"copy {2 * x.numel() / min(seconds(lambda: y.copy_(x)) for _ in range(5)) / 1e12:.2f} TB/s")
    del x, y
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a @ b
    print(f"bf16 8192^3 {2 * 8192**3 / min(seconds(lambda: a @ b) for _ in range(20)) / 1e12:.0f} TFLOP/s", flush=True)


def write(options, results):
    with open(options.out, "w") as file:
        json.dump(results, file, indent=2)
        file.write("\n")
