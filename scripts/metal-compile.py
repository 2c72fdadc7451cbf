#!/usr/bin/env python3
"""Compiles the shipped Metal kernels with compilers other than Apple's (docs/metal.md describes the findings).

    scripts/metal-compile.py              compare registers and stack bytes with scripts/metal-compile/registers.txt
    scripts/metal-compile.py --short      the same for a third of the pipelines, another one every day (.ci/run)
    scripts/metal-compile.py --write      write that file

The text goes through clang's front end for C++ for OpenCL, with real address spaces and with warnings for everything that
C++14 lacks as errors. Then each pipeline of the table goes through LLVM's NVPTX back end and ptxas, the function constants
filled in *after* the optimizer ran on the text, which is the harder order. An array in local memory is an error; registers and
the bytes that ptxas spills at 128 registers are compared with the list.

Needs clang++ 19 or later (MSL_HOST_CLANG, or the newest clang++-N), cargo, and ptxas (PTXAS, or installed by pip into target/).
REGARD_METAL_SOURCE names a file with the text, which the example `metal_source` prints otherwise.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = ROOT / "scripts/metal-compile/metal.h"
GOLDEN = ROOT / "scripts/metal-compile/registers.txt"
WORK = ROOT / "target/metal-compile"
PTXAS_WHEEL = "nvidia-cuda-nvcc-cu12==12.8.93"
# Registers of a thread on Apple's GPUs (32 bits each); ptxas may use as many.
MAX_REGISTERS = 128
TARGET = ["--target=nvptx64-nvidia-cuda", "-Xclang", "-target-cpu", "-Xclang", "sm_90", "-Xclang", "-target-feature", "-Xclang", "+ptx80"]


def run(command, **options):
    """Runs a command; its output, or the end of this program."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def find_clang():
    named = os.environ.get("MSL_HOST_CLANG")
    names = [named] if named else [f"clang++-{n}" for n in range(40, 18, -1)]
    for name in names:
        if shutil.which(name):
            return name
    print("metal-compile: cannot run here: no clang++ 19 or later", file=sys.stderr)
    sys.exit(3)


def find_ptxas():
    if os.environ.get("PTXAS"):
        return os.environ["PTXAS"]
    # xtask installs the same wheel.
    for folder in (ROOT / "target").glob("**/cuda_nvcc/bin/ptxas"):
        return folder
    folder = WORK / "tools"
    run([sys.executable, "-m", "venv", folder])
    run([folder / "bin/pip", "install", "--quiet", PTXAS_WHEEL])
    return next(folder.glob("**/cuda_nvcc/bin/ptxas"))


def close(text, at):
    """The position after the bracket that closes the one at `at`."""
    depth = 0
    for index in range(at, len(text)):
        depth += text[index] in "([{"
        depth -= text[index] in ")]}"
        if depth == 0:
            return index + 1
    raise ValueError("a bracket that is not closed")


def strip_attributes(text):
    return re.sub(r"\s*\[\[[^\]]*\]\]", "", text)


def kernel_parameters(text, name):
    """(declaration, attribute) of each parameter of a kernel template, and its template parameters."""
    found = re.search(r"template <([^>]*)>\s*\[\[kernel[^\]]*\]\] void " + name + r"\(", text)
    end = close(text, found.end() - 1)
    parameters = []
    for parameter in re.split(r",(?![^(\[]*[)\]])", text[found.end() : end - 1]):
        declaration, attribute = re.match(r"\s*(.*?)\s*\[\[(\w+)", parameter, re.S).groups()
        parameters.append((" ".join(declaration.split()), attribute))
    return [word.split()[-1] for word in found[1].split(",")], parameters


def wrapper(text, kernel, base, arguments):
    """An OpenCL kernel that calls one instantiation: OpenCL has no kernel templates."""
    names, parameters = kernel_parameters(text, base)
    declared, passed = [], []
    for declaration, attribute in parameters:
        if attribute not in ("buffer", "threadgroup"):
            passed.append(f"{attribute}()")
            continue
        for name, value in zip(names, arguments):
            declaration = re.sub(rf"\b{name}\b", value, declaration)
        variable = re.search(r"(\w+)$", declaration)[1]
        if "&" in declaration:
            declaration, variable = declaration.replace("&", "*"), "*" + variable
        declared.append(declaration)
        passed.append(variable)
    return f"__kernel void {kernel}({', '.join(declared)}) {{ {base}<{', '.join(arguments)}>({', '.join(passed)}); }}\n"


def shipped_text():
    """The text that regard hands to Metal, printed by an example: the example that `cargo tests` built, if it did."""
    command = ["cargo", "build", "--quiet", "--release", "--workspace", "--exclude", "xtask", "--example", "metal_source"]
    built = subprocess.run([*command, "--message-format=json"], cwd=ROOT, capture_output=True, text=True)
    if built.returncode != 0:
        sys.exit(built.stderr)
    programs = [json.loads(line).get("executable") for line in built.stdout.splitlines()]
    return run([next(filter(None, programs))])


def translate(clang):
    """C++ for OpenCL without kernels, wrappers by kernel name, function constants by name (type)."""
    shipped = os.environ.get("REGARD_METAL_SOURCE")
    source = pathlib.Path(shipped).read_text() if shipped else shipped_text()
    source = re.sub(r"#include <metal_.*", "", source)
    (WORK / "regard.metal").write_text(source)
    text = run([clang, "-E", "-P", "-x", "c++", "-nostdinc", WORK / "regard.metal"])
    text = re.sub(r"#pragma METAL.*", "", text)
    text = text.replace("using namespace metal;", "")
    constants = dict(re.findall(r"constant (?:int|bool) (\w+) \[\[function_constant\((\d+)\)\]\];", text))
    types = dict(re.findall(r"constant (?:int|bool) (\w+) ", "")) or {
        name: kind for kind, name in re.findall(r"constant (int|bool) (\w+) \[\[function_constant", text)
    }
    instantiations = re.findall(r"template \[\[host_name\(([^)]*)\)\]\] \[\[kernel\]\]\s*decltype\((\w+)<([^>]*)>\) [^;]*;", text)
    text = re.sub(r"template \[\[host_name[^;]*;", "", text)
    wrappers = {}
    for name, base, arguments in instantiations:
        kernel = "".join(re.findall(r'"([^"]*)"', name))
        wrappers[kernel] = wrapper(text, kernel, base, [argument.strip() for argument in arguments.split(",")])
    text = re.sub(r"constant (int|bool) (\w+) \[\[function_constant\(\d+\)\]\];", r"extern constant \1 \2;", text)
    text = re.sub(r"vec<float, WIDTH>\(", "convert_to<vec<float, WIDTH>>(", strip_attributes(text))
    assert len(constants) == len(types)
    return f'#include "{HEADER}"\n{text}', wrappers, types


# A pipeline of the table: its kernel, and the function constants that differ from these.
COMMON = {"TILE_KEYS": 32, "SIMD_GROUPS": 8, "ALIGNED": 1, "LSE": 1, "TILE_ROWS": 32}
ALL_FEATURES = {
    "BOUNDED": 1, "BLOCK_SIZE": 16, "SOFTCAP": 1, "ALIBI": 1, "SINKS": 1, "MASK_KIND": 3, "TREE": 1, "OUT_FLOAT": 1, "ALIGNED": 0,
}
# Kernel, dims and rows per block, as in metal/select.rs.
DECODE = [("2x1", 64, (1, 2, 4, 8)), ("4x1", 128, (1, 2, 4, 8)), ("4x2", 256, (1, 2, 4)), ("4x5", 512, (1,)), ("4x5", 576, (1,))]
# Kernel, dims, SIMD groups, and keys per tile for elements of 4 bytes and of 2.
PREFILL = [("8x1", 64, 4, 32, 32), ("16x1", 128, 4, 32, 32), ("16x2", 256, 8, 16, 32), ("18x4", 512, 8, 8, 16), ("18x4", 576, 8, 8, 16)]


# Formats of the cache, as KvFormat numbers them, of which all are loaded by decode and each is staged by prefill with products of its type.
FORMATS = {"f32": 1, "e4m3": 4, "e5m2": 5, "i8": 6, "q8_0": 7, "q4_0": 8}


def cache_pipelines():
    """Pipelines over caches of another type than f16 queries, at dim 128 and with the most rows."""
    shape, dims, rows = DECODE[1]
    for name, number in FORMATS.items():
        formats = {"KEY_FORMAT": number, "VALUE_FORMAT": number}
        constants = {"HEAD_DIM": dims, "VALUE_DIM": dims, **formats}
        yield f"decode_half_{shape}", f"dims {dims}, rows {rows[-1]}, {name} cache", {**constants, "TILE_ROWS": rows[-1]}
        is_code = name in ("e4m3", "e5m2", "i8")
        kernel = "prefill_half" if is_code else "prefill_half_float"
        yield f"{kernel}_{PREFILL[1][0]}", f"dims {dims}, {name} cache", {**constants, "SIMD_GROUPS": PREFILL[1][2]}


def pipelines():
    """(kernel, label, function constants)"""
    yield from cache_pipelines()
    for kind in ("float", "half", "bfloat"):
        decode = {"plain": {}, "all features": ALL_FEATURES}
        prefill = {**decode, "walks splits": {"WALKS_SPLITS": 1}}
        if kind == "bfloat":  # as half, but for conversions
            decode = prefill = {"plain": {}}
        for shape, dims, rows in DECODE:
            for block_rows in rows if kind != "bfloat" else rows[-1:]:
                for feature, values in decode.items():
                    constants = {"HEAD_DIM": dims, "VALUE_DIM": dims, "TILE_ROWS": block_rows, **values}
                    yield f"decode_{kind}_{shape}", f"dims {dims}, rows {block_rows}, {feature}", constants
        if kind == "half":
            for shape, dims, rows in DECODE:
                constants = {"HEAD_DIM": dims, "VALUE_DIM": dims, "TILE_ROWS": rows[-1], "BLOCK_SIZE": 16}
                for label, lists in [("lists of keys", 1), ("lists of two caches", 5)]:
                    yield f"decode_{kind}_{shape}", f"dims {dims}, rows {rows[-1]}, {label}", {**constants, "LISTS": lists}
        for shape, dims, groups, keys_of_4, keys_of_2 in PREFILL:
            tile = keys_of_4 if kind == "float" else keys_of_2
            for feature, values in prefill.items():
                constants = {"HEAD_DIM": dims, "VALUE_DIM": dims, "TILE_KEYS": tile, "SIMD_GROUPS": groups, **values}
                yield f"prefill_{kind}_{shape}", f"dims {dims}, {feature}", constants
        yield f"combine_{kind}", "dims 576", {"HEAD_DIM": 576, "VALUE_DIM": 576, "SIMD_GROUPS": 4, "PARTIAL": 1}
        yield f"merge_{kind}", "", {}
        yield f"append_{kind}", "", {}
        yield f"mask_map_{kind}", "", {}


class Compiler:
    def __init__(self):
        WORK.mkdir(parents=True, exist_ok=True)
        self.clang, self.ptxas = find_clang(), find_ptxas()
        self.version = "clang " + re.search(r"clang version ([\d.]+)", run([self.clang, "--version"]))[1]
        self.text, self.wrappers, self.types = translate(self.clang)

    def optimize_text(self, kernel):
        """LLVM IR of one kernel, optimized while the function constants are unknown."""
        source, ir = WORK / f"{kernel}.clcpp", WORK / f"{kernel}.ll"
        source.write_text(self.text + self.wrappers[kernel])
        warnings = ["-Wall", "-Wextra", "-Wpre-c++17-compat", "-Werror", "-Wno-unused-variable", "-Wno-unused-function", "-Wno-pass-failed",
                    "-Wno-unused-const-variable", "-Wno-missing-field-initializers"]
        flags = ["-x", "clcpp", "-cl-std=clc++1.0", "-cl-no-stdinc", "-O2", "-ffp-contract=off", *warnings, *TARGET]
        run([self.clang, *flags, "-emit-llvm", "-S", "-o", ir, source])

    def registers(self, number, kernel, constants):
        """Registers and bytes of stack of a pipeline; the stack holds the registers that ptxas spills."""
        text = (WORK / f"{kernel}.ll").read_text()
        values = {**COMMON, **constants}
        for name in self.types:
            text = re.sub(
                rf"^@{name} = external .*addrspace\(4\) constant (\w+)", rf"@{name} = internal addrspace(4) constant \1 {int(values.get(name, 0))}",
                text, flags=re.M)
        if "= external" in text:
            sys.exit(f"{kernel}: a function constant without a value")
        stem = WORK / f"pipeline-{number}"
        stem.with_suffix(".ll").write_text(text)
        run([self.clang, "-x", "ir", "-O2", "-S", "-Wno-override-module", *TARGET,
             "-o", stem.with_suffix(".ptx"), stem.with_suffix(".ll")])
        report = run([self.ptxas, "-v", "-arch=sm_90", f"-maxrregcount={MAX_REGISTERS}", "-o", stem.with_suffix(".cubin"), stem.with_suffix(".ptx")])
        if "__local_depot" in stem.with_suffix(".ptx").read_text():
            sys.exit(f"{kernel}, {constants}: an array is in local memory")
        # The kernel comes first; functions that are inlined in it follow.
        return int(re.search(r"Used (\d+) registers", report)[1]), int(re.search(r"(\d+) bytes stack frame", report)[1])


def main():
    compiler = Compiler()
    only = next((word for word in sys.argv[1:] if not word.startswith("--")), "")
    table = [line for line in pipelines() if only in f"{line[0]}: {line[1]}"]
    all_of_them = len(table)
    if "--short" in sys.argv and "--write" not in sys.argv:
        third = int(time.time()) // 86400 % 3
        table = table[third::3]
        print(f"metal-compile: pipelines {third}, {third + 3}, {third + 6} and so on")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiler.optimize_text, sorted({kernel for kernel, _, _ in table})))
        results = list(pool.map(lambda item: compiler.registers(item[0], item[1][0], item[1][2]), enumerate(table)))
    lines = [f"# {compiler.version}; pipeline: 32-bit registers (128 at most), bytes spilled (scripts/metal-compile.py --write)"]
    for (kernel, label, _), (used, stack) in zip(table, results):
        lines.append(f"{kernel}{': ' if label else ''}{label}: {used} {stack}")
    if "--write" in sys.argv:
        GOLDEN.write_text("\n".join(lines) + "\n")
    elif only:
        print("\n".join(lines))
        return
    in_memory = sum(stack > 0 for _, stack in results)
    print(f"metal-compile: {len(table)} pipelines, at most {max(used for used, _ in results)} registers, {in_memory} that spill")
    golden = GOLDEN.read_text().splitlines()
    if golden[0] != lines[0]:
        # Another version of clang assigns other registers. The check above, that nothing is in local memory, holds for
        # any version.
        print(f"metal-compile: {GOLDEN.relative_to(ROOT)} is of another clang, and is not compared: {golden[0]}")
        return
    changed = [line for line in lines if line not in golden]
    wrong_number = len(golden) - 1 != all_of_them
    if changed or wrong_number:
        print(f"metal-compile: {GOLDEN.relative_to(ROOT)} differs; new lines:", *changed, sep="\n  ", file=sys.stderr)
    sys.exit(1 if changed or wrong_number else 0)


if __name__ == "__main__":
    main()
