"""Code that the peers' scripts share: the shapes, the timing rules and the result file of `regard bench`."""

import argparse
import json
import math
import platform
import resource
import statistics
import time

import numpy

# name: (batch, query heads, key/value heads, head dim, query length, key length, causal)
SHAPES = {
    "p2048": (1, 32, 8, 128, 2048, 2048, True),
    "p512": (1, 32, 8, 128, 512, 512, True),
    "p1024d64": (1, 9, 3, 64, 1024, 1024, True),
    "enc512": (1, 12, 12, 64, 512, 512, False),
    "p1024d256": (1, 16, 8, 256, 1024, 1024, True),
    "d4k": (1, 32, 8, 128, 1, 4096, False),
    "d32k": (1, 32, 8, 128, 1, 32768, False),
    "d4kb8": (8, 32, 8, 128, 1, 4096, False),
    "d2kd64": (1, 9, 3, 64, 1, 2048, False),
    "v8": (1, 32, 8, 128, 8, 4096, True),
    "tiny": (1, 9, 3, 64, 1, 64, False),
}
BYTES = {"f32": 4, "bf16": 2, "f16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}

ROTATED_BYTES = 400_000_000
ROTATED_TOKENS = 16
WARM_UP = 3
MIN_SAMPLE = 50e-6
# Maximum seconds of warm-up runs and of measured runs, each.
WARM_UP_LIMIT = 5
LIMIT = 25
QUIET = 0.04


def arguments(description, dtypes):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help="shapes to run (all)")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default=dtypes, help=f"types of operands ({dtypes})")
    parser.add_argument("--seconds", type=float, default=1.0, help="run each shape for so long,")
    parser.add_argument("--repeat", type=int, default=5, help="minimum number of runs")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for other processes to leave the machine alone")
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
    return int(2 * batch * kv_heads * keys * dim * BYTES[dtype])


def copies(name, dtype):
    """Copies of keys and values to rotate over, so that no run finds them in a cache."""
    if name == "tiny" or SHAPES[name][4] > ROTATED_TOKENS:
        return 1
    return -(-ROTATED_BYTES // kv_bytes(name, dtype))


def flops(name):
    batch, heads, _, dim, queries, keys, causal = SHAPES[name]
    square = causal and queries == keys
    pairs = queries * keys / 2 if square else sum(keys - queries + i + 1 for i in range(queries)) if causal else queries * keys
    return 4 * batch * heads * dim * pairs


def used():
    """Seconds of processor time, by everybody and by this process."""
    fields = open("/proc/stat").readline().split()
    own = resource.getrusage(resource.RUSAGE_SELF)
    return sum(int(fields[i]) for i in (1, 2, 3, 6, 7, 8)) / 100, own.ru_utime + own.ru_stime


def others(before, seconds):
    """Cores that others kept busy."""
    after = used()
    return max(0.0, (after[0] - before[0] - (after[1] - before[1])) / seconds)


def wait_for_quiet(patience):
    started = time.perf_counter()
    while time.perf_counter() - started < patience:
        before, begin = used(), time.perf_counter()
        time.sleep(0.7)
        if others(before, time.perf_counter() - begin) < QUIET:
            break


def measure(options, calls):
    """Median and spread of these calls, taken in turn."""
    turn = 0

    def sample(count):
        nonlocal turn
        begin = time.perf_counter()
        for _ in range(count):
            calls[turn % len(calls)]()
            turn += 1
        return (time.perf_counter() - begin) / count

    wait_for_quiet(options.wait)
    warm = []
    while len(warm) < WARM_UP and sum(warm) < WARM_UP_LIMIT:
        warm.append(sample(1))
    count = max(1, min(1000, math.ceil(MIN_SAMPLE / statistics.median(warm))))
    times, before, begin, past = [], used(), time.perf_counter(), 0.0
    while past < options.seconds or (len(times) < options.repeat and past < LIMIT):
        times.append(sample(count))
        past = time.perf_counter() - begin
    busy = others(before, time.perf_counter() - begin)
    times.sort()
    return {
        "seconds": times[(len(times) - 1) // 2],
        "fastest": times[0],
        "quartiles": [times[len(times) // 4], times[len(times) * 3 // 4]],
        "runs": len(times),
        "busy_elsewhere": busy,
    }


def record(options, peer, name, dtype, timing, max_error, cache=None):
    """A result; `cache` is the type of keys and values, if it is not dtype."""
    stored = cache or dtype
    label = f"{name} kv={cache}" if cache else name
    machine = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    result = {
        "name": label,
        "base": name,
        "query_tokens": SHAPES[name][4],
        "peer": peer,
        "device": "cpu",
        "machine": machine,
        "threads": options.threads,
        "dtype": dtype,
        "copies": copies(name, stored),
        **timing,
        "gflops": flops(name) / timing["seconds"] / 1e9,
        "gbytes_per_second": kv_bytes(name, stored) / timing["seconds"] / 1e9,
        "max_error": max_error,
    }
    print(
        f"{peer:28} {label:14} {dtype:5} {timing['seconds'] * 1e3:10.3f} ms {result['gflops']:8.1f} GFLOP/s "
        f"{result['gbytes_per_second']:7.2f} GB/s  error {max_error:.1e}  others busy {timing['busy_elsewhere']:.1f}",
        flush=True,
    )
    return result


def largest_error(name, q, k, v, out):
    """Against f64 on a few rows. q and out are [batch, queries, heads, dim], k and v [batch, heads, keys, dim]: arrays that
    numpy can widen."""
    batch, heads, kv_heads, dim, queries, keys, causal = SHAPES[name]
    worst = 0.0
    for b in {0, batch - 1}:
        for head in {0, heads // 2, heads - 1}:
            kv_head = head // (heads // kv_heads)
            for row in {0, queries // 3, queries - 1}:
                end = keys - queries + row + 1 if causal else keys
                key, value = (x[b, kv_head, :end].astype(numpy.float64) for x in (k, v))
                score = key @ q[b, row, head].astype(numpy.float64) / dim**0.5
                weight = numpy.exp(score - score.max())
                expected = weight @ value / weight.sum()
                worst = max(worst, float(numpy.abs(expected - out[b, row, head].astype(numpy.float64)).max()))
    return worst


def write(options, results):
    with open(options.out, "w") as file:
        json.dump(results, file, indent=2)
        file.write("\n")
