#!/usr/bin/env python3
"""Lets PyPI's Linux wheel of PyTorch run on CPUs without its 2 GB of CUDA libraries: `torch_without_cuda.py SITE_PACKAGES`.

PyPI has no CPU wheel for x86-64 Linux, and the one it has does not load without cuBLAS, cuDNN and others, though a
machine without a GPU never calls them. For each of those libraries this writes an empty one of the same name into
`torch/lib`, with the symbols and versions that PyTorch's libraries ask for. Calling any of them ends the process.
For tests only. Needs gcc and binutils."""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

# Libraries that PyTorch needs and no CPU has a use for; libcudart is small and real (nvidia-cuda-runtime).
STUBBED = re.compile(
    r"lib(cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvshmem_host)\.so"
)
SYMBOL = re.compile(r"^(cublas|cudnn|cufft|cuFile|cupti|curand|cusolver|cusparse|nccl|pnccl|nvshmem)")


def objdump(option, library):
    return subprocess.run(["objdump", option, library], capture_output=True, text=True, check=True).stdout


def needs(library):
    """The libraries that `library` names, and the versions it wants of each."""
    text = objdump("-p", library)
    names = [name for name in re.findall(r"NEEDED\s+(\S+)", text) if STUBBED.match(name)]
    versions = collections.defaultdict(set)
    for block in re.split(r"\n  required from ", text)[1:]:
        name, _, rest = block.partition(":\n")
        if STUBBED.match(name):
            versions[name] |= set(re.findall(r"^\s+0x\S+ 0x\S+ \d+ (\S+)$", rest.split("\n\n")[0], re.M))
    return names, versions


def undefined(library):
    """(symbol, version or empty) that `library` leaves to other libraries."""
    for line in objdump("-T", library).splitlines():
        fields = line.split()
        if "*UND*" in fields and SYMBOL.match(fields[-1]):
            version = fields[-2].strip("()") if fields[-2].startswith("(") else ""
            yield fields[-1], version


def write_stub(path, versions, symbols):
    """One library: versioned symbols in their version, the others in the base version."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        mine = {name for name, version in symbols if version in versions or not version}
        lines = [f".globl {name}\n.type {name},@function\n{name}:" for name in sorted(mine)]
        (folder / "stub.s").write_text(".text\n" + "\n".join(lines) + "\n ud2\n")
        script = ""
        for version in sorted(versions):
            names = "".join(f"{name}; " for name, of in sorted(symbols) if of == version)
            script += f"{version} {{ {f'global: {names}' if names else ''}}};\n"
        (folder / "versions").write_text(script)
        command = ["gcc", "-shared", "-nostdlib", "-o", path, f"-Wl,-soname,{path.name}", folder / "stub.s"]
        if script:
            command.append(f"-Wl,--version-script,{folder / 'versions'}")
        subprocess.run(command, check=True)


def main(site_packages):
    folder = pathlib.Path(site_packages) / "torch" / "lib"
    libraries, versions, symbols = set(), collections.defaultdict(set), set()
    for library in sorted(folder.glob("libtorch*.so")) + sorted(folder.glob("libc10*.so")):
        names, wanted = needs(library)
        libraries.update(names)
        for name, of in wanted.items():
            versions[name] |= of
        symbols.update(undefined(library))
    for name in sorted(libraries):
        if not (folder / name).exists():
            write_stub(folder / name, versions[name], symbols)


if __name__ == "__main__":
    main(*sys.argv[1:])
