"""translate.py KERNELS FOLDER: the attention kernels' sources as C++ for the emulator: inline assembly becomes calls of it, by the table ASSEMBLY."""

import glob, os, re, shutil, sys

KERNELS, FOLDER = sys.argv[1:3]
HERE = os.path.dirname(os.path.abspath(__file__))
# The headers that the emulator has of its own, in the place of the kernels'.
REPLACED = {
    "common/copy.cuh",
    "common/element.cuh",
    "hopper/hopper.cuh",
    "hopper/wgmma.cuh",
    "hopper/codes_wgmma.cuh",
    "hopper/records_instructions.cuh",
}
for folder in ("common", "decode", "prefill", "hopper", "utility"):
    os.makedirs(f"{FOLDER}/{folder}", exist_ok=True)
for path in REPLACED:
    name = os.path.basename(path).removesuffix(".cuh")
    shutil.copy(f"{HERE}/{name}.h", f"{FOLDER}/{path}")
# Fibers change stacks as the fibers of the Metal kernels on the host do.
shutil.copy(f"{HERE}/../../crates/msl-host/runtime/switch.h", FOLDER)
for name in ("emulator.h", "emulator.cpp", "launch.h", "tensor_core.h"):
    shutil.copy(f"{HERE}/{name}", FOLDER)


def closing(s, i):
    """The end of the parenthesis at i."""
    d = 0
    while True:
        if s[i] == "(":
            d += 1
        if s[i] == ")":
            d -= 1
            if d == 0:
                return i
        i += 1


def vector(memory, element, count, address):
    """C++ that declares q_, a pointer to `count` elements of 4 bytes in shared or global memory. They have to be aligned as one vector."""
    size = 4 * count
    if memory == "shared":
        return f"{element} *q_ = ({element} *)emu_at({address}, {size});"
    return f"{element} *q_ = ({element} *)({address}); if ((uintptr_t)q_ % {size}) abort();"


def load(memory, element, count):
    """A vector load: its inputs are the address, its outputs the elements."""

    def cpp(outputs, inputs):
        elements = "".join(f" {outputs[n]} = q_[{n}];" for n in range(count))
        return f"{{ {vector(memory, element, count, inputs[0])}{elements} }}"

    return cpp


def store(memory, element, count):
    """A vector store: its inputs are the address and the elements."""

    def cpp(outputs, inputs):
        elements = "".join(f" q_[{n}] = {inputs[n + 1]};" for n in range(count))
        return f"{{ {vector(memory, element, count, inputs[0])}{elements} }}"

    return cpp


# The C++ of an instruction, by a part of its text: made from its outputs and inputs, as written in the source.
ASSEMBLY = [
    ("cp.async.cg.shared.global.L2::cache_hint", lambda o, i: f"cp_async({i[0]}, {i[1]}, {i[2]});"),
    ("cp.async.ca.shared.global [%0], [%1], 8", lambda o, i: f"emu_copy_later({{{i[0]}, {i[1]}, {i[2]}, 8}});"),
    ("mbarrier::complete_tx::bytes [%0], [%1], %2, [%3]", lambda o, i: f"hopper::bulk_load({', '.join(i)});"),
    ("createpolicy", lambda o, i: f"{o[0]} = 1;"),
    ("st.global.v4.b32", store("global", "unsigned", 4)),
    ("st.shared.v2.f32", store("shared", "float", 2)),
    ("st.shared.b64", lambda o, i: f"*(unsigned long long *)emu_at({i[0]}, 8) = {i[1]};"),
    ("cvt.rna.tf32", lambda o, i: f"{o[0]} = (__float_as_uint({i[0]}) + 0x1000u) & 0xffffe000u;"),
    ("ld.global.nc.v4", load("global", "unsigned", 4)),
    ("atom.acq_rel", lambda o, i: f"{o[0]} = atomicAdd((unsigned *)({i[0]}), 1u);"),
    ("bar.sync", lambda o, i: f"emu_bar({i[0]}, {i[1]});"),
    ("st.global.v2.u32", store("global", "unsigned", 2)),
    ("st.global.v2.f32", store("global", "float", 2)),
    ("mov.u32 %0, dynamic_shared", lambda o, i: f"{o[0]} = 0;"),
    ("griddepcontrol", lambda o, i: ""),
    ("fence.acq_rel", lambda o, i: ""),
    ("st.global.v4.f32", store("global", "float", 4)),
    ("st.global.v2.b32", store("global", "unsigned", 2)),
    ("lop3.b32 %0, %1, %2, %3, 0xea", lambda o, i: f"{o[0]} = (({i[0]}) & ({i[1]})) | ({i[2]});"),
    ("mul.rn.f16x2", lambda o, i: f"{o[0]} = emu_pairs<ElementType::F16>({i[0]}, {i[1]}, 0x80008000);"),
    ("sub.rn.f16x2", lambda o, i: f"{o[0]} = emu_pairs<ElementType::F16>({i[1]}, 0xbc00bc00, {i[0]});"),
    ("fma.rn.f16x2", lambda o, i: f"{o[0]} = emu_pairs<ElementType::F16>({i[0]}, {i[1]}, {i[2]});"),
    ("fma.rn.bf16x2", lambda o, i: f"{o[0]} = emu_pairs<ElementType::BF16>({i[0]}, {i[1]}, {i[2]});"),
    ("mov.b32 {low, high}", lambda o, i: f"{o[0]} = emu_e4m3x2({i[0]} & 0xffff); {o[1]} = emu_e4m3x2({i[0]} >> 16);"),
    ("cvt.rn.f16x2.e4m3x2", lambda o, i: f"{o[0]} = emu_e4m3x2({i[0]});"),
    (
        "@present ld.global",
        lambda o, i: f"if ({i[1]}) {{ {vector('global', 'unsigned', 4, i[0])}" + "".join(f" {o[n]} = q_[{n}];" for n in range(4)) + " }",
    ),
    ("ld.global.ca.b32", lambda o, i: f"{o[0]} = 0;"),
    ("prefetch.global.L2", lambda o, i: ";"),
    ("mov.u32 %0, dynamic_shared;", lambda o, i: f"{o[0]} = shared_address(dynamic_shared);"),
    ("%%laneid", lambda o, i: f"{o[0]} = threadIdx.x & 31;"),
    ("red.release", lambda o, i: f"atomicAdd((unsigned *)({i[0]}), {i[1]});"),
    ("atom.relaxed", lambda o, i: f"{o[0]} = atomicAdd((unsigned *)({i[0]}), 1u);"),
    ("ld.acquire", lambda o, i: f"{o[0]} = *(unsigned *)({i[0]});"),
]


def operands(t):
    """The expressions in a list of operands: "r"(x), "r"(y)."""
    out = []
    i = 0
    while True:
        m = re.compile(r'"[^"]*"\s*\(').search(t, i)
        if not m:
            return out
        e = closing(t, m.end() - 1)
        out.append(t[m.end() : e])
        i = e + 1


def translate(s):
    """A source without its inline assembly."""
    res = ""
    i = 0
    while True:
        m = re.compile(r"\basm( volatile)?\(").search(s, i)
        if not m:
            return res + s[i:]
        res += s[i : m.start()]
        e = closing(s, m.end() - 1)
        body = s[m.end() : e]
        parts = []
        d = 0
        q = False
        last = 0
        j = 0
        while j < len(body):
            c = body[j]
            if c == '"':
                q = not q
            elif not q:
                if c in "([":
                    d += 1
                elif c in ")]":
                    d -= 1
                elif c == ":" and d == 0 and body[j - 1 : j + 1] != "::" and body[j : j + 2] != "::":
                    parts.append(body[last:j])
                    last = j + 1
                elif c == ":" and d == 0 and body[j : j + 2] == "::":
                    parts.append(body[last:j])
                    parts.append("")
                    last = j + 2
                    j += 1
            j += 1
        parts.append(body[last:])
        code = parts[0]
        o = operands(parts[1]) if len(parts) > 1 else []
        ins = operands(parts[2]) if len(parts) > 2 else []
        if code.strip() == '""':
            res += ";"
            i = e + 1 + (s[e + 1] == ";")
            continue
        for key, f in ASSEMBLY:
            if key in code:
                res += f(o, ins)
                break
        else:
            raise SystemExit("unknown asm: " + code)
        i = e + 1
        if s[i] == ";":
            i += 1


for path in sorted(glob.glob("*/*.cu*", root_dir=KERNELS)):
    # Of the utility kernels the emulator runs `append` and `widen`.
    other = path.startswith("utility/") and path not in ("utility/append.cu", "utility/quantize.cuh", "utility/widen.cu")
    if path in REPLACED or other or not os.path.isdir(os.path.dirname(f"{FOLDER}/{path}")):
        continue
    s = open(f"{KERNELS}/{path}").read()
    if path != "common/parameters.cuh":
        s = translate(s)
    s = s.replace("#pragma unroll", "//")
    s = re.sub(r"extern __shared__[^;]*;", "", s)
    s = re.sub(r"__(launch_bounds|maxnreg)__\([^)]*\)", "", s)
    open(f"{FOLDER}/{path}", "w").write(s)
