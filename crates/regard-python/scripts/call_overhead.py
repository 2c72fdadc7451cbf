"""Microseconds of a planned run of one row and one key, which is all overhead, and of the import.

    python crates/regard-python/scripts/call_overhead.py
"""

import subprocess
import sys
import time

import numpy
import regard


def fastest(call, rounds=40, calls=250):
    """Microseconds of a call, the best of some rounds: other programs only add to it."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def arrays(name):
    operands = [numpy.ones((1, 1, 1, 16), numpy.float32) for _ in range(4)]
    if name == "torch":
        import torch

        operands = [torch.from_numpy(operand) for operand in operands]
    return operands


for name in ("numpy", "torch"):
    try:
        q, k, v, out = arrays(name)
    except ImportError:
        print(f"{name}: not installed")
        continue
    plan = regard.Plan(q, k, v)
    print(f"planned run, {name}: {fastest(lambda: plan.run(q, k, v, out)):.2f} us")
code = "import time; t = time.perf_counter(); import regard; print(time.perf_counter() - t)"
seconds = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
print(f"import: {1e3 * seconds:.1f} ms")
