"""Fused attention for LLM inference, on the CPU and on NVIDIA GPUs.

    import numpy as np, regard
    q = np.ones((1, 2, 4, 64), np.float32)  # [batch, tokens, heads, dim]
    k = v = np.ones((1, 5, 2, 64), np.float32)  # two query heads share a key/value head
    out = regard.attention(q, k, v, causal=True)

Arrays are NumPy's, PyTorch's (CPU and CUDA), JAX's, CuPy's, or any with DLPack or
`__cuda_array_interface__`; nothing is copied. Results are arrays of q's library.
`regard.torch` has the same as operators of PyTorch, `regard.transformers` as an attention
implementation of Hugging Face transformers.
"""

from ._regard import (
    Appended,
    ArgumentError,
    Buffer,
    DriverError,
    Error,
    OutOfPages,
    PageAllocator,
    Plan,
    Refusal,
    Sequence,
    Step,
    __version__,
    alibi_slopes,
    append,
    append_latent,
    attention,
    copy_blocks,
    cuda_devices,
    merge,
)

__all__ = [
    "Appended",
    "ArgumentError",
    "Buffer",
    "DriverError",
    "Error",
    "OutOfPages",
    "PageAllocator",
    "Plan",
    "Refusal",
    "Sequence",
    "Step",
    "__version__",
    "alibi_slopes",
    "append",
    "append_latent",
    "attention",
    "copy_blocks",
    "cuda_devices",
    "merge",
]
