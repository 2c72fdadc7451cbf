"""The pipelines of scripts/metal-compile.py through Mesa's compiler for Apple's GPUs: scripts/agx.sh runs this.

The shipped text becomes LLVM IR as in metal-compile.py, and SPIR-V by LLVM's own back end; AGX_REPORT names the program
that takes it from there.
"""
import importlib.util
import os
import re
import struct
import subprocess
import sys

specification = importlib.util.spec_from_file_location("metal_compile", "scripts/metal-compile.py")
metal_compile = importlib.util.module_from_spec(specification)
specification.loader.exec_module(metal_compile)

metal_compile.WORK = metal_compile.ROOT / "target/agx/work"
metal_compile.find_ptxas = lambda: None
# Mesa reads no tables of constants.
metal_compile.TARGET = ["--target=spirv64-unknown-unknown", "-fno-jump-tables"]
with_parameters = metal_compile.wrapper


def wrapper(text, kernel, base, arguments):
    """Threadgroup memory as a variable, and the size of a threadgroup, which Mesa wants to know."""
    source = with_parameters(text, kernel, base, arguments)
    shared = re.search(r",?\s*threadgroup (\w+)\s*\* ?(\w+)", source)
    if shared:
        source = source.replace(shared[0], "", 1).replace("{ ", f"{{ threadgroup {shared[1]} {shared[2]}[8192]; ", 1)
    return f"__attribute__((reqd_work_group_size(256, 1, 1))) {source}"


metal_compile.wrapper = wrapper

# Conversions of a vector of COUNT elements, or of one.
CONVERSIONS = """
define internal {float} @widen_{name}({half} %x) alwaysinline {{
  %bits = zext {half} %x to {word}
  %high = shl {word} %bits, {sixteen}
  %value = bitcast {word} %high to {float}
  ret {float} %value
}}
define internal {half} @narrow_{name}({float} %x) alwaysinline {{
  %bits = bitcast {float} %x to {word}
  %low = lshr {word} %bits, {sixteen}
  %odd = and {word} %low, {one}
  %bias = add {word} %odd, {almost_half}
  %rounded = add {word} %bits, %bias
  %high = lshr {word} %rounded, {sixteen}
  %value = trunc {word} %high to {half}
  ret {half} %value
}}
"""


def lower_bfloat(text):
    """LLVM IR without bfloat, which Mesa's SPIR-V does not have: AGX computes in f32, and converts by shifts."""
    counts = set()

    def name(count):
        counts.add(count)
        return f"vector_{count}" if count else "scalar"

    def convert(function, result, argument, count, value):
        return f"call {result} @{function}_{name(count)}({argument} {value})"

    def compare(match):
        """With a constant, in f32: `fcmp PREDICATE bfloat VALUE, CONSTANT`."""
        number, predicate, value, constant = match.groups()
        single = struct.unpack("<f", struct.pack("<I", int(constant, 16) << 16))[0]
        bits = struct.unpack("<Q", struct.pack("<d", single))[0]
        widened = convert("widen", "float", "bfloat", None, value)
        return f"  %widened_{number} = {widened}\n  %{number} = fcmp {predicate} float %widened_{number}, 0x{bits:016X}"

    flags = r"(?:fast |nnan |ninf |nsz |contract |reassoc )*"
    text = re.sub(rf"fpext {flags}(bfloat|<(\d+) x bfloat>) (\S+) to (float|<\d+ x float>)",
                  lambda match: convert("widen", match[4], match[1], match[2], match[3]), text)
    text = re.sub(rf"fptrunc {flags}(float|<(\d+) x float>) (\S+) to (bfloat|<\d+ x bfloat>)",
                  lambda match: convert("narrow", match[4], match[1], match[2], match[3]), text)
    text = re.sub(r"^  %(\d+) = fcmp ([a-z ]+) bfloat (\S+), 0xR([0-9A-F]{4})", compare, text, flags=re.M)
    text = re.sub(r"\b0xR([0-9A-F]{4})", lambda match: str(int(match[1], 16)), text)
    text = re.sub(r"\bbfloat\b", "i16", text)
    for count in sorted(counts, key=str):
        types = {kind: f"<{count} x {llvm}>" if count else llvm for kind, llvm in [("float", "float"), ("half", "i16"), ("word", "i32")]}
        numbers = {"sixteen": 16, "one": 1, "almost_half": 0x7FFF}
        values = {kind: f"splat (i32 {value})" if count else value for kind, value in numbers.items()}
        text += CONVERSIONS.format(name=name(count), **types, **values)
    return text


def report(compiler, kernel, constants):
    """Mesa's statistics of a pipeline."""
    text = (metal_compile.WORK / f"{kernel}.ll").read_text()
    values = {**metal_compile.COMMON, **constants}
    for name in compiler.types:
        text = re.sub(rf"^@{name} = external .*addrspace\(2\) constant (\w+)",
                      rf"@{name} = internal addrspace(2) constant \1 {int(values.get(name, 0))}", text, flags=re.M)
    stem = metal_compile.WORK / "pipeline"
    stem.with_suffix(".ll").write_text(lower_bfloat(text))
    metal_compile.run([compiler.clang, "-x", "ir", "-O2", "-c", "-Wno-override-module", *metal_compile.TARGET,
                       "-o", stem.with_suffix(".spv"), stem.with_suffix(".ll")])
    done = subprocess.run([os.environ["AGX_REPORT"], stem.with_suffix(".spv")], capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line or "FAILED" in line or "failed" in line]
        sys.exit(f"{kernel}, {constants}: exit status {done.returncode}: {'; '.join(errors[:3])}")
    pattern = r"(\d+) inst,.* (\d+) regs,.* (\d+) scratch, (\d+) threads,.* (\d+):(\d+) spills"
    instructions, halves, scratch, threads, spills, fills = map(int, re.search(pattern, done.stdout).groups())
    return f"{(halves + 1) // 2} {spills}:{fills} {scratch} {instructions} {threads}"


def main():
    compiler = metal_compile.Compiler()
    only = "".join(sys.argv[1:2])
    print(f"# Mesa 25.0, {compiler.version}; pipeline: 32-bit registers, spills:fills, bytes of scratch, instructions, threads per core")
    optimized = set()
    for kernel, label, constants in metal_compile.pipelines():
        pipeline = f"{kernel}: {label}"
        # The optimizer makes calls for bfloat in append, such as fabs, which lower_bfloat does not know.
        if kernel.startswith("prefill") or kernel == "append_bfloat" or only not in pipeline:
            continue
        if kernel not in optimized:
            compiler.optimize_text(kernel)
            optimized.add(kernel)
        print(f"{kernel}{': ' if label else ''}{label}: {report(compiler, kernel, constants)}", flush=True)


if __name__ == "__main__":
    main()
