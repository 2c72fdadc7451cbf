//! The structs and numbers of the ABI: plain data, as C lays it out.
//!
//! Enumerations are plain integers in structs: any value that a caller puts there is sound to read.

use std::ffi::{c_char, c_void};

/// The version of this ABI. A program that is compiled against one version works with every library
/// that answers the same number. Structs may grow at their end within a version; their `size` field
/// gives how much of them a caller knows.
///
/// 2: a tensor's strides count with its option `REGARD_STRIDED` only; in version 1, strides that
/// were all 0 meant contiguous.
pub const REGARD_ABI_VERSION: u32 = 2;

/// Maximum number of dimensions of a tensor.
pub const REGARD_MAX_RANK: usize = 5;

/// The result of a call. `regard_last_error` has the message.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// An argument breaks the contract: the text names it, its value and the allowed values.
    /// Nothing was written.
    Argument = 1,
    /// The request is sound, but nothing runs it on that device: the text has the reason. Nothing
    /// was written.
    Refused = 2,
    /// The device or its driver failed; the text is its message. Outputs may be half written.
    Device = 3,
    /// A defect of the library: the text is its message. Outputs may be half written.
    Internal = 4,
}

/// Element types: the `dtype` of a tensor or problem. 0 is none of them.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// The upper half of a binary32.
    Bf16 = 3,
    /// 32-bit signed integer: lengths, block tables, tree masks.
    I32 = 4,
    /// One byte, 0 for false: boolean masks.
    Bool = 5,
    /// An 8-bit float (OCP "e4m3fn": 4 exponent bits, no infinity, at most 448): codes of a cache.
    E4m3 = 6,
    /// An 8-bit float (OCP: 5 exponent bits, at most 57344): codes of a cache.
    E5m2 = 7,
    /// 8-bit signed integer, -127 to 127: codes of a cache.
    I8 = 8,
    /// A block of 32 values in 34 bytes, as GGUF's Q8_0: an f16 scale, then 32 signed bytes. The
    /// block is the element, aligned to 2 bytes: a head dim of 128 is a last dimension of 4.
    Q8_0 = 9,
    /// A block of 32 values in 18 bytes, as GGUF's Q4_0: an f16 scale, then 16 bytes. Byte i holds
    /// value i in its low and value i + 16 in its high four bits, each plus 8.
    Q4_0 = 10,
    /// A row of a latent cache, 576 values in 656 bytes, as serving engines store it: 512 E4M3
    /// codes, 4 f32 scales, one per 128 codes, and 64 bf16 rotary dims. The row is the element,
    /// aligned to 4 bytes: a head dim of 576 is a last dimension of 1. Keys only, with
    /// `REGARD_VALUES_KEY_PREFIX`.
    Mla656 = 11,
    /// The first 512 values of rows of MLA656: the type of values over such keys, in problems.
    Mla656Latent = 12,
}

/// Kinds of device: the `kind` of a device.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// This machine's CPU; operands and workspace are in the host's memory.
    Cpu = 0,
    /// An NVIDIA GPU; operands and workspace are in its memory, lengths and tables too.
    Cuda = 1,
    /// An Apple GPU. The `data` of every tensor is an `id<MTLBuffer>`, and `offset` is the tensor's
    /// place in it. The workspace is an `id<MTLBuffer>` too, and a `stream` is an
    /// `id<MTLComputeCommandEncoder>`.
    Metal = 2,
}

/// Option: a query at position p sees keys up to p. Without it every key in use is seen.
pub const REGARD_CAUSAL: u32 = 1 << 0;
/// Option: a query at p sees no key before p - `window_left`.
pub const REGARD_WINDOW_LEFT: u32 = 1 << 1;
/// Option: a query at p sees no key after p + `window_right`.
pub const REGARD_WINDOW_RIGHT: u32 = 1 << 2;
/// Option: scores become `softcap * tanh(score / softcap)`, before any bias.
pub const REGARD_SOFTCAP: u32 = 1 << 3;
/// Option: a row's bits do not depend on its neighbours, the batch size, the chunking or the page
/// layout.
pub const REGARD_BATCH_INVARIANT: u32 = 1 << 4;
/// Option of operands: the field `scale` counts. Without it the scale is 1/sqrt(Dk).
pub const REGARD_SCALE: u32 = 1 << 5;
/// Option of operands: the field `q_offset` counts. Without it, and without `q_offsets`, it is
/// kv_len - q_len: the queries are the last tokens of the cache.
pub const REGARD_Q_OFFSET: u32 = 1 << 6;
/// Option of a problem: `alibi_slopes` will be given.
pub const REGARD_ALIBI: u32 = 1 << 7;
/// Option of a problem: `sinks` will be given.
pub const REGARD_SINKS: u32 = 1 << 8;
/// Option of a problem: `tree_mask` will be given. It replaces `REGARD_CAUSAL`.
pub const REGARD_TREE: u32 = 1 << 9;
/// Option of a problem: `lse` will be asked for.
pub const REGARD_LSE: u32 = 1 << 10;
/// Option of a problem: queries are ragged (`cu_seqlens_q` will be given); `query_rows` counts.
pub const REGARD_RAGGED_QUERIES: u32 = 1 << 11;
/// Option of a problem: keys and values are ragged (`cu_seqlens_k` will be given).
pub const REGARD_RAGGED_KEYS: u32 = 1 << 12;
/// Option: a query at p sees key j only if j / `chunk` = p / `chunk`, rounded down (chunked
/// attention).
pub const REGARD_CHUNK: u32 = 1 << 13;
/// Option: values are the first Dv dims of keys (the latent cache of multi-head latent attention).
/// `v` is that view of `k`, or null: then Dv is the head dim of `out`. The scales of keys are the
/// scales of values too; `v_scales` is null, or the same view.
pub const REGARD_VALUES_KEY_PREFIX: u32 = 1 << 14;
/// Option: entries of `key_indices` are physical slots of the pool, block * block_size + slot,
/// without a `block_table`. Nothing that needs positions or lengths may be given.
pub const REGARD_INDICES_ARE_SLOTS: u32 = 1 << 16;
/// Option of a problem: `key_indices` or `page_indices` will be given; `list_len` counts.
pub const REGARD_KEY_LISTS: u32 = 1 << 17;
/// Option of a problem: there is a list per key/value head.
pub const REGARD_LISTS_PER_HEAD: u32 = 1 << 18;
/// Option: keys are at positions of their own, key j at offset + stride * j: a shard of sequences
/// that are spread over devices. Needs `REGARD_Q_OFFSET` or `q_offsets`. Not together with
/// `tree_mask`, `REGARD_INDICES_ARE_SLOTS` or `page_indices`.
pub const REGARD_KEY_POSITIONS: u32 = 1 << 19;
/// Option of a problem with `REGARD_KEY_LISTS`: `page_indices` will be given, not `key_indices`.
pub const REGARD_LISTS_OF_PAGES: u32 = 1 << 20;
/// Option of a problem with `REGARD_LISTS_OF_PAGES`: `page_numbers` will be given.
pub const REGARD_PAGE_NUMBERS: u32 = 1 << 21;
/// Option of a problem with `REGARD_KEY_LISTS`: `second_indices` will be given; `second_list_len`
/// counts.
pub const REGARD_SECOND_LISTS: u32 = 1 << 22;

/// Option of a tensor: its field `strides` is used. A stride of 0 gives every index of that
/// dimension the same elements, as `expand` of other libraries does. Without this option the tensor
/// is contiguous.
pub const REGARD_STRIDED: u32 = 1 << 0;
/// Option of a tensor: its field `offset` is used. Without this option the field is not read, and
/// is not there for programs that were compiled before it existed.
pub const REGARD_OFFSET: u32 = 1 << 1;

/// A view of memory that the caller owns, at least until the call that got it returns (on a GPU:
/// until its work is done). `regard_contiguous` and `regard_strided` fill one in.
///
/// Any dimension order in memory is a matter of strides: `[batch, head, sequence, dim]` is a tensor
/// of shape `[batch, sequence, head, dim]` with strides `{H * L * D, D, L * D, 1}`. The innermost
/// stride of everything is 1.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    /// The first element, aligned for its type: an address in host memory, or in the device's. On
    /// an Apple GPU the buffer that holds the tensor, an `id<MTLBuffer>`. Inputs are never written.
    /// May be null if there are no elements.
    pub data: *mut c_void,
    /// A `regard_dtype`.
    pub dtype: i32,
    /// Dimensions in use, 1 to `REGARD_MAX_RANK`.
    pub rank: u32,
    /// Elements in each dimension, from 0 up. Entries past `rank` are not read.
    pub shape: [i64; REGARD_MAX_RANK],
    /// With `REGARD_STRIDED`: elements from one index to the next in each dimension. Without it
    /// they must be 0, and the tensor is contiguous, its last dimension innermost. Entries past
    /// `rank` are not read.
    pub strides: [i64; REGARD_MAX_RANK],
    /// `REGARD_STRIDED` and `REGARD_OFFSET`, or-ed.
    pub options: u32,
    /// Must be 0.
    pub reserved: u32,
    /// With `REGARD_OFFSET`: bytes from `data` to the first element.
    pub offset: u64,
}

/// The operands and options of an attention call: pointers to tensors, null for absent ones. Set
/// everything to zero, `size` to `sizeof(regard_operands)`, and then the fields that you need.
///
/// B sequences; Hq query heads over Hkv key/value heads (Hq a multiple of Hkv); head dims Dk and Dv
/// of 1 to 576; Lq queries and Lk key slots per sequence. Positions count keys: query row i of a
/// sequence is at i + its q_offset.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Operands {
    /// `sizeof(regard_operands)`, in bytes.
    pub size: usize,

    /// Queries: `[B, Lq, Hq, Dk]`, or `[rows, Hq, Dk]` with `cu_seqlens_q`; f32, f16 or bf16.
    /// Required.
    pub q: *const Tensor,
    /// Keys: `[B, Lk, Hkv, Dk]`, or `[rows, Hkv, Dk]` with `cu_seqlens_k`, or a pool `[blocks,
    /// block_size, Hkv, Dk]` with `block_table`. Of any `regard_dtype` but I32 and BOOL, for any
    /// type of `q`. For Q8_0 and Q4_0 the last dimension counts blocks, Dk / 32. For MLA656 it is
    /// 1. Required.
    pub k: *const Tensor,
    /// Values: as `k`, with Dv for Dk; not always of the type of `k`. Required without
    /// `REGARD_VALUES_KEY_PREFIX`.
    pub v: *const Tensor,
    /// The result: as `q`, with Dv for Dk; of the type of `q`, or f32. Every element is written.
    /// Required.
    pub out: *const Tensor,
    /// f32, the shape of `out` without its last dimension: the natural logarithm of each row's
    /// softmax denominator, the sink included; minus infinity for a row that sees nothing. Written
    /// if given.
    pub lse: *const Tensor,

    /// `[B, Hq, Lq, Lk]`, any dimension 1 for all. bool: a key is kept where true. f32, f16 or
    /// bf16: added to the score in natural units.
    pub mask: *const Tensor,
    /// `[Hq]` f32: minus slope times distance is added to each score.
    pub alibi_slopes: *const Tensor,
    /// `[Hq]` f32: one more logit in each head's softmax denominator.
    pub sinks: *const Tensor,
    /// `[B, Lq, ceil(Lq / 32)]` i32: bit t % 32 of word t / 32 lets a row see new token t (the last
    /// Lq keys are the new tokens). Every row sees all earlier keys. Replaces `REGARD_CAUSAL`.
    pub tree_mask: *const Tensor,

    /// `[B]` i32: keys in use of each sequence. Without it, all.
    pub kv_lens: *const Tensor,
    /// `[B]` i32: the position of each sequence's first query row; may be negative. Not together
    /// with `REGARD_Q_OFFSET`.
    pub q_offsets: *const Tensor,
    /// `[B + 1]` i32, from 0 to rows: sequence b owns rows `cu_seqlens_q[b]` to `cu_seqlens_q[b +
    /// 1]` of `q` and `out`.
    pub cu_seqlens_q: *const Tensor,
    /// `[B + 1]` i32: likewise for `k` and `v`.
    pub cu_seqlens_k: *const Tensor,
    /// `[B, max_blocks]` i32: key j of sequence b is slot j % block_size of block `block_table[b, j
    /// / block_size]`. Needs `kv_lens`. Entries that no row can see may hold anything.
    pub block_table: *const Tensor,

    /// `REGARD_CAUSAL` and the others, or-ed. A number below counts only with its option, and must
    /// be 0 without it.
    pub options: u32,
    /// With `REGARD_SCALE`: multiplies the dot products.
    pub scale: f32,
    /// With `REGARD_SOFTCAP`: above 0.
    pub softcap: f32,
    /// With `REGARD_CHUNK`: positions per chunk, from 1 to 2^31 - 1.
    pub chunk: u32,
    /// With `REGARD_WINDOW_LEFT`: keys before a query's position that it sees, from 0 up.
    pub window_left: i64,
    /// With `REGARD_WINDOW_RIGHT`: keys after a query's position that it sees, from 0 up.
    pub window_right: i64,
    /// With `REGARD_Q_OFFSET`: the position of every sequence's first query row, from -2^31 to
    /// 2^31 - 1. 0 aligns the first query with the first key.
    pub q_offset: i64,

    /// f32: multiplies the codes of keys. Required if `k` is of E4M3, E5M2 or I8, and not given
    /// otherwise. The shape of `k` without its last dimension, any of them 1 for all: one scale for
    /// the tensor, per head, per block and head, or per token and head. Any strides.
    pub k_scales: *const Tensor,
    /// Likewise of `v`.
    pub v_scales: *const Tensor,

    /// `[rows, Hkv or 1, n]` i32: the keys that each row of `q` attends to, by position. Entries
    /// that are negative, or not below the sequence's length, are skipped; each other entry counts
    /// once as listed. Without it, rows attend to all keys.
    pub key_indices: *const Tensor,
    /// `[rows, Hkv or 1]` i32: the entries of each list that are used, from its start. Without it,
    /// all.
    pub key_counts: *const Tensor,

    /// With `REGARD_KEY_POSITIONS` and without `key_offset`: `[B]` i32, the position of each
    /// sequence's first key.
    pub key_offsets: *const Tensor,
    /// With `REGARD_KEY_POSITIONS` and without `key_offsets`: the position of every sequence's
    /// first key, from -2^31 to 2^31 - 1.
    pub key_offset: i64,
    /// With `REGARD_KEY_POSITIONS`: from one key's position to the next one's, from 1 to 2^15.
    pub key_stride: i64,
    /// `[B]` i32: the prefix group of each sequence, from 0 up; -1 for none. Sequences of a group
    /// share their first keys, so the first entries of their rows of `block_table` are equal.
    /// Results are the same within the tolerance; the prefix may be read once for all of them.
    pub prefix_groups: *const Tensor,
    /// `[groups]` i32: the keys that the sequences of each group share, at most the length of each.
    /// Given together with `prefix_groups`.
    pub prefix_lens: *const Tensor,

    /// `[Hkv or 1, B, n]` i32: the blocks of the pools `k` and `v` that the rows of each sequence
    /// attend to, per key/value head or for all of them, instead of a `block_table`. Entries that
    /// are no block are skipped.
    pub page_indices: *const Tensor,
    /// `[Hkv or 1, B]` i32: the keys of each list, which end within its last used block. Without
    /// it, all slots of the `n` blocks.
    pub page_list_lens: *const Tensor,
    /// The shape of `page_indices`, i32: the number of each listed block in its sequence. Needs
    /// `REGARD_Q_OFFSET` or `q_offsets`. Without it, nothing that needs positions may be given.
    pub page_numbers: *const Tensor,

    /// `[blocks, block_size, Hkv, Dk]`: a second pool of keys, of the type of `k`. Its blocks may
    /// be of another size.
    pub second_k: *const Tensor,
    /// Likewise of values. Null with `REGARD_VALUES_KEY_PREFIX`: values are in `second_k`.
    pub second_v: *const Tensor,
    /// f32: the scales of `second_k`, as `k_scales` of `k`.
    pub second_k_scales: *const Tensor,
    /// Likewise of `second_v`.
    pub second_v_scales: *const Tensor,
    /// `[rows, Hkv or 1, n]` i32: a second list of each row of `q`, of physical slots of the second
    /// pools. One softmax runs over both lists. Needs `key_indices` and `REGARD_INDICES_ARE_SLOTS`.
    pub second_indices: *const Tensor,
    /// `[rows, Hkv or 1]` i32: the entries of each second list that are used. Without it, all.
    pub second_counts: *const Tensor,

    /// With `REGARD_VALUES_KEY_PREFIX`: the last dims of keys, whose first dims are `k` and values.
    /// The shape of `k` with Dk - Dv for Dv, of its type and with its scales. Not with `second_k`.
    pub rotary_k: *const Tensor,
}

/// Option of an append: neighbours make a pair (`x[2 i]` and `x[2 i + 1]`) in the rotary embedding.
/// Without it the halves do (`x[i]` and `x[i + dims / 2]`).
pub const REGARD_ROTARY_INTERLEAVED: u32 = 1 << 0;
/// Option of an append: the pool is a latent cache, whose rows are keys and whose first dims are
/// values (`REGARD_VALUES_KEY_PREFIX`). `value` and `value_pool` are null, and the last dims are
/// rotated.
pub const REGARD_APPEND_LATENT: u32 = 1 << 1;
/// Option of an append: scales of keys are computed, one per token and head, and written to
/// `k_scales`. Without it `k_scales` is read.
pub const REGARD_APPEND_DYNAMIC_K_SCALES: u32 = 1 << 2;
/// The same for values and `v_scales`.
pub const REGARD_APPEND_DYNAMIC_V_SCALES: u32 = 1 << 3;

/// New tokens for a cache. Set everything to zero, `size` to `sizeof(regard_append)`, and then the
/// fields that you need.
///
/// Sequence b has `kv_lens[b]` tokens afterwards, of which the last are new; each goes to slot
/// token % block_size of block `block_table[b, token / block_size]`. Tokens whose entry names no
/// block are dropped.
///
/// Pools have the type of the new tokens, or a format of 8 or 4 bits that these are quantized to
/// after rotation, keys and values independently. See `docs/caches.md` for the rounding.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Append {
    /// `sizeof(regard_append)`, in bytes.
    pub size: usize,
    /// New keys: `[rows, Hkv, Dk]`; f32, f16 or bf16. Required.
    pub key: *const Tensor,
    /// New values: `[rows, Hkv, Dv]`, of that type. Required without `REGARD_APPEND_LATENT`.
    pub value: *const Tensor,
    /// Destination of keys: `[blocks, block_size, Hkv, Dk]`, or `[B, Lk, Hkv, Dk]` without
    /// `block_table`; Dk / 32 blocks of q8_0 or q4_0. Written. Required.
    pub key_pool: *const Tensor,
    /// Destination of values: `[blocks, block_size, Hkv, Dv]`, likewise. Written. Required without
    /// `REGARD_APPEND_LATENT`.
    pub value_pool: *const Tensor,
    /// `[B, max_blocks]` i32. Null: sequence b is row b of `[B, Lk, Hkv, D]`.
    pub block_table: *const Tensor,
    /// `[B]` i32: tokens of each sequence, the new ones included. Required.
    pub kv_lens: *const Tensor,
    /// `[B + 1]` i32, from 0 to rows: sequence b brings rows `cu_seqlens[b]` to `cu_seqlens[b +
    /// 1]`. Without it each brings rows / B.
    pub cu_seqlens: *const Tensor,
    /// Rotary position embedding of the keys on the way: f32 `[positions, dims]`, for every
    /// position dims / 2 cosines and then as many sines. The first `dims` of each head are rotated,
    /// or with `REGARD_APPEND_LATENT` the last.
    /// Tokens at or past `positions` take the last.
    pub rotary_table: *const Tensor,
    /// With `rotary_table`: queries of the same tokens, `[rows, Hq, Dk]`, rotated in place.
    pub query: *const Tensor,
    /// `REGARD_ROTARY_INTERLEAVED` and the options that start with `REGARD_APPEND_`, or-ed.
    pub options: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Scales of keys in a pool of e4m3, e5m2 or i8, required there and null otherwise: f32,
    /// broadcastable to `[blocks, block_size, Hkv]` (each dimension that, or 1). With
    /// `REGARD_APPEND_DYNAMIC_K_SCALES` they have exactly that shape, and are written.
    pub k_scales: *const Tensor,
    /// Scales of values, likewise.
    pub v_scales: *const Tensor,
}

/// Partial results over disjoint sets of keys, and the result of their merge. Set everything to
/// zero, `size` to `sizeof(regard_merge)`, and then the fields that you need.
///
/// On a GPU every tensor is contiguous from the second dimension of the parts on; the CPU takes any
/// strides. Rows may be any number of dimensions. A part whose log-sum-exp is minus infinity has
/// seen no key: its output is not read. If no part has seen a key, 0 and minus infinity are
/// written.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Merge {
    /// `sizeof(regard_merge)`, in bytes.
    pub size: usize,
    /// Each part's output: `[parts, rows, dim]`; f32, f16 or bf16. Required.
    pub parts: *const Tensor,
    /// Their log-sum-exps: f32 `[parts, rows]`. Required.
    pub part_lse: *const Tensor,
    /// The merged output: `[rows, dim]`; f32, f16 or bf16. Written. Required.
    pub out: *const Tensor,
    /// Its log-sum-exp: f32 `[rows]`. Written.
    pub lse: *const Tensor,
}

/// A copy of the first `slots` slots of a block to another block.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block to read.
    pub from: i64,
    /// The block to write.
    pub to: i64,
    /// Slots, from slot 0.
    pub slots: i64,
}

/// Copies between the blocks of a cache's pools. Set everything to zero, `size` to
/// `sizeof(regard_block_copies)`, and then the fields that you need.
///
/// Copies are made one after the other, in every pool. Elements are moved and not looked into:
/// pools may be of any type. Pools may be interleaved, but no two have an element in common.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BlockCopies {
    /// `sizeof(regard_block_copies)`, in bytes.
    pub size: usize,
    /// `pool_count` pointers to tensors: keys, values and scales of all layers, `[blocks,
    /// block_size, ...]`, with any further dimensions and any strides. All have as many blocks and
    /// slots; a pool with something per block instead of per slot has 1 in place of `block_size`.
    /// Written.
    pub pools: *const *const Tensor,
    /// Number of pools.
    pub pool_count: usize,
    /// `copy_count` copies, to be made in this order.
    pub copies: *const BlockCopy,
    /// Number of copies.
    pub copy_count: usize,
}

/// The shape of an attention call: all that a plan depends on, without data. Lengths are upper
/// bounds: a plan for them also runs smaller batches and shorter sequences. Set everything to zero,
/// `size` to `sizeof(regard_problem)`, and then the fields that you need.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Problem {
    /// `sizeof(regard_problem)`, in bytes.
    pub size: usize,
    /// Sequences.
    pub batch: i64,
    /// Query heads, a multiple of `kv_heads`.
    pub query_heads: i64,
    /// Key/value heads.
    pub kv_heads: i64,
    /// Head dim of queries and keys, 1 to 576.
    pub head_dim: i64,
    /// Head dim of values and outputs, 1 to 576; 0 for the head dim of the keys.
    pub value_dim: i64,
    /// The longest query of any sequence.
    pub query_len: i64,
    /// Maximum keys of a sequence.
    pub kv_len: i64,
    /// With `REGARD_RAGGED_QUERIES`: rows of all sequences together.
    pub query_rows: i64,
    /// Slots per block of paged keys and values; 0 for keys that are not paged.
    pub block_size: i64,
    /// With `REGARD_WINDOW_LEFT`.
    pub window_left: i64,
    /// With `REGARD_WINDOW_RIGHT`.
    pub window_right: i64,
    /// The `regard_dtype` of queries, and of keys and values unless noted otherwise below.
    pub dtype: i32,
    /// Type of the output; 0 for the type of the queries.
    pub out_dtype: i32,
    /// Type of the mask; 0 for no mask.
    pub mask_dtype: i32,
    /// `REGARD_CAUSAL` and the others, or-ed.
    pub options: u32,
    /// With `REGARD_CHUNK`: positions per chunk, from 1 to 2^31 - 1.
    pub chunk: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Type of keys; 0 for the type of the queries.
    pub key_dtype: i32,
    /// Type of values; 0 for the type of the queries.
    pub value_dtype: i32,
    /// With `REGARD_KEY_LISTS`: entries of the longest list; slots of all its blocks, with
    /// `REGARD_LISTS_OF_PAGES`.
    pub list_len: i64,
    /// With `REGARD_KEY_POSITIONS`: the stride. A plan depends only on whether it is 1.
    pub key_stride: i64,
    /// Maximum prefix groups: `prefix_lens` will have that many entries. 0 if none are given.
    pub prefix_groups: i64,
    /// With `REGARD_SECOND_LISTS`: entries of the longest second list.
    pub second_list_len: i64,
    /// With `REGARD_VALUES_KEY_PREFIX`: the last of `head_dim` dims, which `rotary_k` will have; 0
    /// if keys are in one tensor.
    pub rotary_dim: i64,
}

/// For `regard_plan_run_prepared`: the workspace has the schedule of the step.
pub const REGARD_PREPARED_SCHEDULE: u32 = 1 << 0;
/// For `regard_plan_run_prepared`: the workspace has the tile map of the mask.
pub const REGARD_PREPARED_TILE_MAP: u32 = 1 << 1;

/// The place of a mask's tile map in the workspace, and its extents: a byte for each sequence,
/// head, block of rows and K tile, in this order, without gaps. 0: the mask hides all keys of the
/// tile from all rows of the block. 1: it changes no score (on the CPU, of a boolean mask only). 2:
/// neither, or not known; results are as right then, but on a GPU not always to the bit.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct TileMap {
    /// `sizeof(regard_tile_map)`, in bytes.
    pub size: usize,
    /// Offset in the workspace, in bytes.
    pub at: usize,
    /// Size of the map, in bytes; 0 if there is none.
    pub bytes: usize,
    /// Sequences; 1 if the mask is the same for all.
    pub batch: i64,
    /// Query heads, likewise. On Metal, key/value heads.
    pub heads: i64,
    /// Blocks of rows, likewise.
    pub row_blocks: i64,
    /// K tiles; on the CPU, likewise.
    pub key_tiles: i64,
    /// Rows per block. A row is a query token of a head. On Metal rows are packed: row r of a
    /// key/value head is token r / group of its query head r % group.
    pub block_rows: i64,
    /// Keys per tile.
    pub tile_keys: i64,
}

/// Work that an executor's threads are to do.
pub type Work = Option<unsafe extern "C" fn(work_data: *mut c_void)>;

/// Threads of the caller's: calls `work(work_data)` from up to `copies` threads at once (the
/// calling one may be among them) and returns when all these calls have returned. Fewer calls are
/// fine: the library does the rest on the calling thread. It has to return: it must not throw an
/// exception or jump out (either is undefined; a C++ exception ends the process).
pub type Executor = Option<
    unsafe extern "C" fn(
        executor_data: *mut c_void,
        copies: usize,
        work: Work,
        work_data: *mut c_void,
    ),
>;

/// The device to run on. A null pointer in its place means this machine's CPU, all threads. Set
/// everything to zero, `size` to `sizeof(regard_device)`, and then the fields that you need.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Device {
    /// `sizeof(regard_device)`, in bytes.
    pub size: usize,
    /// A `regard_device_kind`.
    pub kind: i32,
    /// CUDA: the device's number, from 0. Must be 0 otherwise.
    pub ordinal: i32,
    /// CUDA: null, or the device's primary context (a `CUcontext`), the one that CUDA's runtime and
    /// PyTorch use; no other is taken. Metal: null for the system's default device, or an
    /// `id<MTLDevice>`, which is retained as long as the process lives. Must be null otherwise.
    pub context: *mut c_void,
    /// Null for a device that is here. The name of a machine, to plan for one that need not be
    /// here: `scalar`, `avx2`, `avx512`, `neon` (this CPU held to that level; runs if it has it),
    /// `h200`, `a100`, `m1` to `m5`, `m2-pro`.
    pub machine: *const c_char,
    /// CPU: threads to use, 0 for all. Must be 0 otherwise.
    pub threads: u32,
    /// Must be 0.
    pub reserved: u32,
    /// CPU: the caller's threads; null for the library's own. Must be null otherwise.
    pub executor: Executor,
    /// Handed to `executor`.
    pub executor_data: *mut c_void,
}

// A change of these is a change of the ABI.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<Tensor>() == 112);
    assert!(size_of::<Operands>() == 312);
    assert!(size_of::<Append>() == 104);
    assert!(size_of::<Problem>() == 168);
    assert!(size_of::<Device>() == 56);
    assert!(size_of::<TileMap>() == 72);
};
