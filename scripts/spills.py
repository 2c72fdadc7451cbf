#!/usr/bin/env python3
"""Innermost loops with products in the CPU kernels, and which of them move vectors from or to the stack (docs/perf/cpu.md, "Registers").

    python3 scripts/spills.py target/release/regard
"""
import collections
import re
import subprocess
import sys

KERNEL = re.compile(r"^[0-9a-f]+ <.*cpu::compiled::(\w+::(?:product|dots|weighted|softmax))>:$")
PRODUCT = re.compile(r"vfn?madd|vdpbf16ps")
VECTOR = re.compile(r"%[xyz]mm")
# Longer loops are the loops around the innermost ones.
LONGEST = 400


def functions(binary):
    """Name and instructions (address, text) of each kernel function."""
    command = ["objdump", "-d", "--no-show-raw-insn", "-C", binary]
    body = None
    found = []
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.endswith(">:"):
            name = KERNEL.match(line)
            body = []
            if name:
                found.append((name[1], body))
        elif body is not None and (instruction := re.match(r"\s*([0-9a-f]+):\s+(.*)$", line)):
            body.append((int(instruction[1], 16), instruction[2]))
    return found


def innermost(body):
    """The texts of each loop that has products and no smaller loop with products inside."""
    places = {address: i for i, (address, _) in enumerate(body)}
    jumps = ((i, re.match(r"j\w+\s+([0-9a-f]+)", text)) for i, (_, text) in enumerate(body))
    starts = ((places.get(int(jump[1], 16), len(body)), i) for i, jump in jumps if jump)
    loops = [
        (start, end)
        for start, end in starts
        if start <= end < start + LONGEST and any(PRODUCT.match(text) for _, text in body[start : end + 1])
    ]
    for start, end in loops:
        if not any((s, e) != (start, end) and start <= s and e <= end for s, e in loops):
            yield [text for _, text in body[start : end + 1]]


counts = collections.defaultdict(lambda: [0, []])
for name, body in functions(sys.argv[1]):
    for loop in innermost(body):
        moves = sum("%rsp" in text and VECTOR.search(text) is not None for text in loop)
        counts[name][0] += 1
        if moves:
            counts[name][1].append(f"{moves} beside {sum(PRODUCT.match(text) is not None for text in loop)} products")
for name, (loops, moving) in sorted(counts.items()):
    print(f"{name:28} {loops:3} loops, {len(moving)} with vectors on the stack{': ' if moving else ''}{', '.join(moving)}")
