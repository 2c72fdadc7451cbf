"""Types of regard's compiled part. Docstrings are with the objects: `help(regard.attention)`."""

from typing import Any, Literal, Protocol, TypeAlias, TypeVar, final, overload

__version__: str

class _DLPack(Protocol):
    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

Array: TypeAlias = _DLPack | _CudaArray | "Buffer"
"""An array of NumPy, PyTorch, JAX or CuPy, or any with DLPack or `__cuda_array_interface__`."""

Ints: TypeAlias = Array | list[int] | tuple[int, ...]
"""32-bit integers on the device of q; on the CPU also 64-bit ones and lists."""

Stream: TypeAlias = int | Any
"""A `cudaStream_t` as a number, or a stream object of PyTorch, CuPy or with `__cuda_stream__`."""

DType: TypeAlias = Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"]
Format: TypeAlias = Literal["e4m3", "e5m2", "i8", "q8_0", "q4_0", "mla656"]
Window: TypeAlias = tuple[int | None, int | None] | None
_Q = TypeVar("_Q")
_P = TypeVar("_P")
_Out = TypeVar("_Out")

class Error(Exception): ...

class ArgumentError(Error, ValueError):
    argument: str
    found: str
    allowed: str

class Refusal(Error, RuntimeError):
    machine: str
    reason: str

class OutOfPages(Error, MemoryError):
    needed: int
    free: int
    total: int

class DriverError(Error, RuntimeError):
    doing: str
    reason: str

@overload
def attention(
    q: _Q,
    k: Array,
    v: Array | None,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window = None,
    chunk: int | None = None,
    softcap: float | None = None,
    q_offset: int | Ints | None = None,
    key_offset: int | Ints | None = None,
    key_stride: int | None = None,
    mask: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    tree_mask: Array | None = None,
    kv_lens: Ints | None = None,
    cu_seqlens_q: Ints | None = None,
    cu_seqlens_k: Ints | None = None,
    block_table: Array | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    rotary_k: Array | None = None,
    key_indices: Array | None = None,
    key_counts: Array | None = None,
    page_indices: Array | None = None,
    page_list_lens: Array | None = None,
    page_numbers: Array | None = None,
    second_k: Array | None = None,
    second_v: Array | None = None,
    second_k_scales: Array | None = None,
    second_v_scales: Array | None = None,
    second_indices: Array | None = None,
    second_counts: Array | None = None,
    prefix_groups: Array | None = None,
    prefix_lens: Array | None = None,
    indices_are_slots: bool = False,
    kv_format: Format | None = None,
    k_format: Format | None = None,
    v_format: Format | None = None,
    batch_invariant: bool = False,
    layout: Literal["bshd", "bhsd"] = "bshd",
    kv_layout: Literal["nhd", "hnd"] = "nhd",
    max_query_len: int | None = None,
    max_kv_len: int | None = None,
    out: Array | None = None,
    out_dtype: DType | Any | None = None,
    lse: Literal[False] | None = None,
    stream: Stream | None = None,
    threads: int | None = None,
) -> _Q: ...
@overload
def attention(
    q: _Q,
    k: Array,
    v: Array | None,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window = None,
    chunk: int | None = None,
    softcap: float | None = None,
    q_offset: int | Ints | None = None,
    key_offset: int | Ints | None = None,
    key_stride: int | None = None,
    mask: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    tree_mask: Array | None = None,
    kv_lens: Ints | None = None,
    cu_seqlens_q: Ints | None = None,
    cu_seqlens_k: Ints | None = None,
    block_table: Array | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    rotary_k: Array | None = None,
    key_indices: Array | None = None,
    key_counts: Array | None = None,
    page_indices: Array | None = None,
    page_list_lens: Array | None = None,
    page_numbers: Array | None = None,
    second_k: Array | None = None,
    second_v: Array | None = None,
    second_k_scales: Array | None = None,
    second_v_scales: Array | None = None,
    second_indices: Array | None = None,
    second_counts: Array | None = None,
    prefix_groups: Array | None = None,
    prefix_lens: Array | None = None,
    indices_are_slots: bool = False,
    kv_format: Format | None = None,
    k_format: Format | None = None,
    v_format: Format | None = None,
    batch_invariant: bool = False,
    layout: Literal["bshd", "bhsd"] = "bshd",
    kv_layout: Literal["nhd", "hnd"] = "nhd",
    max_query_len: int | None = None,
    max_kv_len: int | None = None,
    out: Array | None = None,
    out_dtype: DType | Any | None = None,
    lse: Literal[True] | Array,
    stream: Stream | None = None,
    threads: int | None = None,
) -> tuple[_Q, _Q]: ...

@final
class Plan:
    def __new__(
        cls,
        q: Array,
        k: Array,
        v: Array | None,
        *,
        value_dim: int | None = None,
        scale: float | None = None,
        causal: bool = False,
        window: Window = None,
        chunk: int | None = None,
        softcap: float | None = None,
        q_offset: int | Ints | None = None,
        key_offset: int | Ints | None = None,
        key_stride: int | None = None,
        mask: Array | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        tree_mask: Array | None = None,
        kv_lens: Ints | None = None,
        cu_seqlens_q: Ints | None = None,
        cu_seqlens_k: Ints | None = None,
        block_table: Array | None = None,
        k_scales: Array | None = None,
        v_scales: Array | None = None,
        rotary_k: Array | None = None,
        key_indices: Array | None = None,
        key_counts: Array | None = None,
        page_indices: Array | None = None,
        page_list_lens: Array | None = None,
        page_numbers: Array | None = None,
        second_k: Array | None = None,
        second_v: Array | None = None,
        second_k_scales: Array | None = None,
        second_v_scales: Array | None = None,
        second_indices: Array | None = None,
        second_counts: Array | None = None,
        prefix_groups: Array | None = None,
        prefix_lens: Array | None = None,
        indices_are_slots: bool = False,
        kv_format: Format | None = None,
        k_format: Format | None = None,
        v_format: Format | None = None,
        batch_invariant: bool = False,
        layout: Literal["bshd", "bhsd"] = "bshd",
        kv_layout: Literal["nhd", "hnd"] = "nhd",
        max_query_len: int | None = None,
        max_kv_len: int | None = None,
        out_dtype: DType | Any | None = None,
        lse: bool = False,
        threads: int | None = None,
    ) -> Plan: ...
    def run(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        out: Array,
        *,
        lse: Array | None = None,
        q_offset: int | Ints | None = None,
        key_offset: int | Ints | None = None,
        mask: Array | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        tree_mask: Array | None = None,
        kv_lens: Ints | None = None,
        cu_seqlens_q: Ints | None = None,
        cu_seqlens_k: Ints | None = None,
        block_table: Array | None = None,
        k_scales: Array | None = None,
        v_scales: Array | None = None,
        rotary_k: Array | None = None,
        key_indices: Array | None = None,
        key_counts: Array | None = None,
        page_indices: Array | None = None,
        page_list_lens: Array | None = None,
        page_numbers: Array | None = None,
        second_k: Array | None = None,
        second_v: Array | None = None,
        second_k_scales: Array | None = None,
        second_v_scales: Array | None = None,
        second_indices: Array | None = None,
        second_counts: Array | None = None,
        prefix_groups: Array | None = None,
        prefix_lens: Array | None = None,
        stream: Stream | None = None,
        scheduled: bool = False,
        mapped: bool = False,
    ) -> None: ...
    def schedule(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        out: Array,
        *,
        lse: Array | None = None,
        q_offset: int | Ints | None = None,
        key_offset: int | Ints | None = None,
        mask: Array | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        tree_mask: Array | None = None,
        kv_lens: Ints | None = None,
        cu_seqlens_q: Ints | None = None,
        cu_seqlens_k: Ints | None = None,
        block_table: Array | None = None,
        k_scales: Array | None = None,
        v_scales: Array | None = None,
        rotary_k: Array | None = None,
        key_indices: Array | None = None,
        key_counts: Array | None = None,
        page_indices: Array | None = None,
        page_list_lens: Array | None = None,
        page_numbers: Array | None = None,
        second_k: Array | None = None,
        second_v: Array | None = None,
        second_k_scales: Array | None = None,
        second_v_scales: Array | None = None,
        second_indices: Array | None = None,
        second_counts: Array | None = None,
        prefix_groups: Array | None = None,
        prefix_lens: Array | None = None,
        stream: Stream | None = None,
    ) -> None: ...
    def map_mask(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        out: Array,
        *,
        lse: Array | None = None,
        q_offset: int | Ints | None = None,
        key_offset: int | Ints | None = None,
        mask: Array | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        tree_mask: Array | None = None,
        kv_lens: Ints | None = None,
        cu_seqlens_q: Ints | None = None,
        cu_seqlens_k: Ints | None = None,
        block_table: Array | None = None,
        k_scales: Array | None = None,
        v_scales: Array | None = None,
        rotary_k: Array | None = None,
        key_indices: Array | None = None,
        key_counts: Array | None = None,
        page_indices: Array | None = None,
        page_list_lens: Array | None = None,
        page_numbers: Array | None = None,
        second_k: Array | None = None,
        second_v: Array | None = None,
        second_k_scales: Array | None = None,
        second_v_scales: Array | None = None,
        second_indices: Array | None = None,
        second_counts: Array | None = None,
        prefix_groups: Array | None = None,
        prefix_lens: Array | None = None,
        stream: Stream | None = None,
    ) -> None: ...
    def prepare(self, stream: Stream | None = None) -> None: ...
    def explain(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def kernel(self) -> str: ...
    @property
    def device(self) -> str: ...

def append(
    key: Array,
    value: Array,
    key_pool: Array,
    value_pool: Array,
    block_table: Array,
    kv_lens: Ints,
    *,
    cu_seqlens: Ints | None = None,
    rotary_table: Array | None = None,
    interleaved: bool = False,
    query: Array | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    dynamic_k_scales: bool = False,
    dynamic_v_scales: bool = False,
    kv_format: Format | None = None,
    k_format: Format | None = None,
    v_format: Format | None = None,
    kv_layout: Literal["nhd", "hnd"] = "nhd",
    stream: Stream | None = None,
) -> None: ...
def append_latent(
    key: Array,
    key_pool: Array,
    block_table: Array,
    kv_lens: Ints,
    *,
    cu_seqlens: Ints | None = None,
    rotary_table: Array | None = None,
    interleaved: bool = False,
    query: Array | None = None,
    k_scales: Array | None = None,
    dynamic_k_scales: bool = False,
    kv_format: Format | None = None,
    k_format: Format | None = None,
    kv_layout: Literal["nhd", "hnd"] = "nhd",
    stream: Stream | None = None,
) -> None: ...
def merge(
    parts: _Q,
    part_lse: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    stream: Stream | None = None,
) -> tuple[_Q, _Q]: ...
def copy_blocks(
    pools: list[Array] | tuple[Array, ...],
    copies: list[tuple[int, int, int]] | tuple[tuple[int, int, int], ...],
    *,
    kv_layout: Literal["nhd", "hnd"] | None = None,
    stream: Stream | None = None,
) -> None: ...
def alibi_slopes(query_heads: int) -> list[float]: ...
def cuda_devices() -> list[str]: ...
def describe(array: Array) -> tuple[str, list[int], list[int], str]: ...

@final
class Buffer:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    def tolist(self) -> list[Any]: ...
    def __dlpack__(
        self,
        *,
        stream: Any | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

@final
class Sequence:
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

@final
class Appended:
    @property
    def copy(self) -> tuple[int, int, int] | None: ...
    @property
    def positions(self) -> range: ...
    @property
    def ranges(self) -> list[tuple[int, range, range]]: ...
    @property
    def slots(self) -> list[int]: ...

@final
class PageAllocator:
    def __new__(cls, blocks: int, block_size: int) -> PageAllocator: ...
    @property
    def block_size(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def used_blocks(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    def create(self) -> Sequence: ...
    def fork(self, sequence: Sequence, length: int | None = None) -> Sequence: ...
    def append(self, sequence: Sequence, tokens: int) -> Appended: ...
    def blocks_needed(self, sequence: Sequence, tokens: int) -> int: ...
    def truncate(self, sequence: Sequence, length: int) -> None: ...
    def release_before(self, sequence: Sequence, position: int) -> int: ...
    def free(self, sequence: Sequence) -> None: ...
    def length(self, sequence: Sequence) -> int: ...
    def blocks(self, sequence: Sequence) -> list[int]: ...
    def holders(self, block: int) -> int: ...
    @overload
    def block_table(self, sequences: list[Sequence], out: None = None) -> Buffer: ...
    @overload
    def block_table(self, sequences: list[Sequence], out: _Out) -> _Out: ...
    @overload
    def kv_lens(self, sequences: list[Sequence], out: None = None) -> Buffer: ...
    @overload
    def kv_lens(self, sequences: list[Sequence], out: _Out) -> _Out: ...

@final
class Step:
    def __new__(cls) -> Step: ...
    def clear(self) -> None: ...
    def append(self, pages: PageAllocator, sequence: Sequence, tokens: int) -> None: ...
    def finish(self, pages: PageAllocator) -> None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def cu_seqlens_q(self) -> Buffer: ...
    @property
    def kv_lens(self) -> Buffer: ...
    @property
    def block_table(self) -> Buffer: ...
    @property
    def prefix_groups(self) -> Buffer: ...
    @property
    def prefix_lens(self) -> Buffer: ...
    @property
    def has_prefix_groups(self) -> bool: ...
    @property
    def positions(self) -> Buffer: ...
    @property
    def slots(self) -> Buffer: ...
    @property
    def copies(self) -> list[tuple[int, int, int]]: ...
    @property
    def packed(self) -> Buffer: ...
    def tables(self, packed: _P) -> dict[str, _P]: ...
