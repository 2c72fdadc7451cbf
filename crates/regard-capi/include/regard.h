// regard: fused attention for LLM inference. The C interface.
//
// Written by `cargo xtask header` from crates/regard-capi. Do not edit. The guide, with a complete program, is docs/c-abi.md.
// docs/semantics.md defines the results, to the last detail.
//
// Rules for every function:
// - Pointers to structs are null or point to a struct of that type; tensors describe memory that is there. regard checks shapes,
//   strides, lengths and tables against each other, but cannot see how much memory an address has behind it.
// - Inputs are neither written nor freed. Write no input, and touch neither outputs nor workspace, until the call returns (on
//   a GPU: until its work on the stream is done).
// - Lengths are in elements or tokens, names with `bytes` are in bytes. Shapes are in the order of their names.
// - Structs whose first field is `size` start zeroed, with sizeof in it: fields that are not set then mean their default.
// - Functions can be called from any thread. None throws, unwinds or ends the process on bad input: the answer is a status, and
//   the words are regard_last_error's, which belong to the calling thread.

#ifndef REGARD_H
#define REGARD_H

#include <stddef.h>
#include <stdint.h>

// The version of this ABI. A program that is compiled against one version works with every library
// that answers the same number. Structs may grow at their end within a version; their `size` field
// gives how much of them a caller knows.
//
// 2: a tensor's strides count with its option `REGARD_STRIDED` only; in version 1, strides that
// were all 0 meant contiguous.
#define REGARD_ABI_VERSION 2

// Maximum number of dimensions of a tensor.
#define REGARD_MAX_RANK 5

// Option: a query at position p sees keys up to p. Without it every key in use is seen.
#define REGARD_CAUSAL (1 << 0)

// Option: a query at p sees no key before p - `window_left`.
#define REGARD_WINDOW_LEFT (1 << 1)

// Option: a query at p sees no key after p + `window_right`.
#define REGARD_WINDOW_RIGHT (1 << 2)

// Option: scores become `softcap * tanh(score / softcap)`, before any bias.
#define REGARD_SOFTCAP (1 << 3)

// Option: a row's bits do not depend on its neighbours, the batch size, the chunking or the page
// layout.
#define REGARD_BATCH_INVARIANT (1 << 4)

// Option of operands: the field `scale` counts. Without it the scale is 1/sqrt(Dk).
#define REGARD_SCALE (1 << 5)

// Option of operands: the field `q_offset` counts. Without it, and without `q_offsets`, it is
// kv_len - q_len: the queries are the last tokens of the cache.
#define REGARD_Q_OFFSET (1 << 6)

// Option of a problem: `alibi_slopes` will be given.
#define REGARD_ALIBI (1 << 7)

// Option of a problem: `sinks` will be given.
#define REGARD_SINKS (1 << 8)

// Option of a problem: `tree_mask` will be given. It replaces `REGARD_CAUSAL`.
#define REGARD_TREE (1 << 9)

// Option of a problem: `lse` will be asked for.
#define REGARD_LSE (1 << 10)

// Option of a problem: queries are ragged (`cu_seqlens_q` will be given); `query_rows` counts.
#define REGARD_RAGGED_QUERIES (1 << 11)

// Option of a problem: keys and values are ragged (`cu_seqlens_k` will be given).
#define REGARD_RAGGED_KEYS (1 << 12)

// Option: a query at p sees key j only if j / `chunk` = p / `chunk`, rounded down (chunked
// attention).
#define REGARD_CHUNK (1 << 13)

// Option: values are the first Dv dims of keys (the latent cache of multi-head latent attention).
// `v` is that view of `k`, or null: then Dv is the head dim of `out`. The scales of keys are the
// scales of values too; `v_scales` is null, or the same view.
#define REGARD_VALUES_KEY_PREFIX (1 << 14)

// Option: entries of `key_indices` are physical slots of the pool, block * block_size + slot,
// without a `block_table`. Nothing that needs positions or lengths may be given.
#define REGARD_INDICES_ARE_SLOTS (1 << 16)

// Option of a problem: `key_indices` or `page_indices` will be given; `list_len` counts.
#define REGARD_KEY_LISTS (1 << 17)

// Option of a problem: there is a list per key/value head.
#define REGARD_LISTS_PER_HEAD (1 << 18)

// Option: keys are at positions of their own, key j at offset + stride * j: a shard of sequences
// that are spread over devices. Needs `REGARD_Q_OFFSET` or `q_offsets`. Not together with
// `tree_mask`, `REGARD_INDICES_ARE_SLOTS` or `page_indices`.
#define REGARD_KEY_POSITIONS (1 << 19)

// Option of a problem with `REGARD_KEY_LISTS`: `page_indices` will be given, not `key_indices`.
#define REGARD_LISTS_OF_PAGES (1 << 20)

// Option of a problem with `REGARD_LISTS_OF_PAGES`: `page_numbers` will be given.
#define REGARD_PAGE_NUMBERS (1 << 21)

// Option of a problem with `REGARD_KEY_LISTS`: `second_indices` will be given; `second_list_len`
// counts.
#define REGARD_SECOND_LISTS (1 << 22)

// Option of a tensor: its field `strides` is used. A stride of 0 gives every index of that
// dimension the same elements, as `expand` of other libraries does. Without this option the tensor
// is contiguous.
#define REGARD_STRIDED (1 << 0)

// Option of a tensor: its field `offset` is used. Without this option the field is not read, and
// is not there for programs that were compiled before it existed.
#define REGARD_OFFSET (1 << 1)

// Option of an append: neighbours make a pair (`x[2 i]` and `x[2 i + 1]`) in the rotary embedding.
// Without it the halves do (`x[i]` and `x[i + dims / 2]`).
#define REGARD_ROTARY_INTERLEAVED (1 << 0)

// Option of an append: the pool is a latent cache, whose rows are keys and whose first dims are
// values (`REGARD_VALUES_KEY_PREFIX`). `value` and `value_pool` are null, and the last dims are
// rotated.
#define REGARD_APPEND_LATENT (1 << 1)

// Option of an append: scales of keys are computed, one per token and head, and written to
// `k_scales`. Without it `k_scales` is read.
#define REGARD_APPEND_DYNAMIC_K_SCALES (1 << 2)

// The same for values and `v_scales`.
#define REGARD_APPEND_DYNAMIC_V_SCALES (1 << 3)

// For `regard_plan_run_prepared`: the workspace has the schedule of the step.
#define REGARD_PREPARED_SCHEDULE (1 << 0)

// For `regard_plan_run_prepared`: the workspace has the tile map of the mask.
#define REGARD_PREPARED_TILE_MAP (1 << 1)

// The result of a call. `regard_last_error` has the message.
enum regard_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Done.
  REGARD_STATUS_OK = 0,
  // An argument breaks the contract: the text names it, its value and the allowed values.
  // Nothing was written.
  REGARD_STATUS_ARGUMENT = 1,
  // The request is sound, but nothing runs it on that device: the text has the reason. Nothing
  // was written.
  REGARD_STATUS_REFUSED = 2,
  // The device or its driver failed; the text is its message. Outputs may be half written.
  REGARD_STATUS_DEVICE = 3,
  // A defect of the library: the text is its message. Outputs may be half written.
  REGARD_STATUS_INTERNAL = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum regard_status regard_status;
#else
typedef int32_t regard_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Element types: the `dtype` of a tensor or problem. 0 is none of them.
enum regard_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // IEEE 754 binary32.
  REGARD_DTYPE_F32 = 1,
  // IEEE 754 binary16.
  REGARD_DTYPE_F16 = 2,
  // The upper half of a binary32.
  REGARD_DTYPE_BF16 = 3,
  // 32-bit signed integer: lengths, block tables, tree masks.
  REGARD_DTYPE_I32 = 4,
  // One byte, 0 for false: boolean masks.
  REGARD_DTYPE_BOOL = 5,
  // An 8-bit float (OCP "e4m3fn": 4 exponent bits, no infinity, at most 448): codes of a cache.
  REGARD_DTYPE_E4M3 = 6,
  // An 8-bit float (OCP: 5 exponent bits, at most 57344): codes of a cache.
  REGARD_DTYPE_E5M2 = 7,
  // 8-bit signed integer, -127 to 127: codes of a cache.
  REGARD_DTYPE_I8 = 8,
  // A block of 32 values in 34 bytes, as GGUF's Q8_0: an f16 scale, then 32 signed bytes. The
  // block is the element, aligned to 2 bytes: a head dim of 128 is a last dimension of 4.
  REGARD_DTYPE_Q8_0 = 9,
  // A block of 32 values in 18 bytes, as GGUF's Q4_0: an f16 scale, then 16 bytes. Byte i holds
  // value i in its low and value i + 16 in its high four bits, each plus 8.
  REGARD_DTYPE_Q4_0 = 10,
  // A row of a latent cache, 576 values in 656 bytes, as serving engines store it: 512 E4M3
  // codes, 4 f32 scales, one per 128 codes, and 64 bf16 rotary dims. The row is the element,
  // aligned to 4 bytes: a head dim of 576 is a last dimension of 1. Keys only, with
  // `REGARD_VALUES_KEY_PREFIX`.
  REGARD_DTYPE_MLA656 = 11,
  // The first 512 values of rows of MLA656: the type of values over such keys, in problems.
  REGARD_DTYPE_MLA656_LATENT = 12,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum regard_dtype regard_dtype;
#else
typedef int32_t regard_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Kinds of device: the `kind` of a device.
enum regard_device_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // This machine's CPU; operands and workspace are in the host's memory.
  REGARD_DEVICE_KIND_CPU = 0,
  // An NVIDIA GPU; operands and workspace are in its memory, lengths and tables too.
  REGARD_DEVICE_KIND_CUDA = 1,
  // An Apple GPU. The `data` of every tensor is an `id<MTLBuffer>`, and `offset` is the tensor's
  // place in it. The workspace is an `id<MTLBuffer>` too, and a `stream` is an
  // `id<MTLComputeCommandEncoder>`.
  REGARD_DEVICE_KIND_METAL = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum regard_device_kind regard_device_kind;
#else
typedef int32_t regard_device_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The execution of a problem on a device. Made once, run many times, from any number of threads at
// once (each run with separate workspace and outputs).
typedef struct regard_plan regard_plan;

// Work that an executor's threads are to do.
typedef void (*regard_work)(void *work_data);

// Threads of the caller's: calls `work(work_data)` from up to `copies` threads at once (the
// calling one may be among them) and returns when all these calls have returned. Fewer calls are
// fine: the library does the rest on the calling thread. It has to return: it must not throw an
// exception or jump out (either is undefined; a C++ exception ends the process).
typedef void (*regard_executor)(void *executor_data, size_t copies, regard_work work, void *work_data);

// The device to run on. A null pointer in its place means this machine's CPU, all threads. Set
// everything to zero, `size` to `sizeof(regard_device)`, and then the fields that you need.
typedef struct regard_device {
  // `sizeof(regard_device)`, in bytes.
  size_t size;
  // A `regard_device_kind`.
  int32_t kind;
  // CUDA: the device's number, from 0. Must be 0 otherwise.
  int32_t ordinal;
  // CUDA: null, or the device's primary context (a `CUcontext`), the one that CUDA's runtime and
  // PyTorch use; no other is taken. Metal: null for the system's default device, or an
  // `id<MTLDevice>`, which is retained as long as the process lives. Must be null otherwise.
  void *context;
  // Null for a device that is here. The name of a machine, to plan for one that need not be
  // here: `scalar`, `avx2`, `avx512`, `neon` (this CPU held to that level; runs if it has it),
  // `h200`, `a100`, `m1` to `m5`, `m2-pro`.
  const char *machine;
  // CPU: threads to use, 0 for all. Must be 0 otherwise.
  uint32_t threads;
  // Must be 0.
  uint32_t reserved;
  // CPU: the caller's threads; null for the library's own. Must be null otherwise.
  regard_executor executor;
  // Handed to `executor`.
  void *executor_data;
} regard_device;

// A view of memory that the caller owns, at least until the call that got it returns (on a GPU:
// until its work is done). `regard_contiguous` and `regard_strided` fill one in.
//
// Any dimension order in memory is a matter of strides: `[batch, head, sequence, dim]` is a tensor
// of shape `[batch, sequence, head, dim]` with strides `{H * L * D, D, L * D, 1}`. The innermost
// stride of everything is 1.
typedef struct regard_tensor {
  // The first element, aligned for its type: an address in host memory, or in the device's. On
  // an Apple GPU the buffer that holds the tensor, an `id<MTLBuffer>`. Inputs are never written.
  // May be null if there are no elements.
  void *data;
  // A `regard_dtype`.
  int32_t dtype;
  // Dimensions in use, 1 to `REGARD_MAX_RANK`.
  uint32_t rank;
  // Elements in each dimension, from 0 up. Entries past `rank` are not read.
  int64_t shape[REGARD_MAX_RANK];
  // With `REGARD_STRIDED`: elements from one index to the next in each dimension. Without it
  // they must be 0, and the tensor is contiguous, its last dimension innermost. Entries past
  // `rank` are not read.
  int64_t strides[REGARD_MAX_RANK];
  // `REGARD_STRIDED` and `REGARD_OFFSET`, or-ed.
  uint32_t options;
  // Must be 0.
  uint32_t reserved;
  // With `REGARD_OFFSET`: bytes from `data` to the first element.
  uint64_t offset;
} regard_tensor;

// The operands and options of an attention call: pointers to tensors, null for absent ones. Set
// everything to zero, `size` to `sizeof(regard_operands)`, and then the fields that you need.
//
// B sequences; Hq query heads over Hkv key/value heads (Hq a multiple of Hkv); head dims Dk and Dv
// of 1 to 576; Lq queries and Lk key slots per sequence. Positions count keys: query row i of a
// sequence is at i + its q_offset.
typedef struct regard_operands {
  // `sizeof(regard_operands)`, in bytes.
  size_t size;
  // Queries: `[B, Lq, Hq, Dk]`, or `[rows, Hq, Dk]` with `cu_seqlens_q`; f32, f16 or bf16.
  // Required.
  const struct regard_tensor *q;
  // Keys: `[B, Lk, Hkv, Dk]`, or `[rows, Hkv, Dk]` with `cu_seqlens_k`, or a pool `[blocks,
  // block_size, Hkv, Dk]` with `block_table`. Of any `regard_dtype` but I32 and BOOL, for any
  // type of `q`. For Q8_0 and Q4_0 the last dimension counts blocks, Dk / 32. For MLA656 it is
  // 1. Required.
  const struct regard_tensor *k;
  // Values: as `k`, with Dv for Dk; not always of the type of `k`. Required without
  // `REGARD_VALUES_KEY_PREFIX`.
  const struct regard_tensor *v;
  // The result: as `q`, with Dv for Dk; of the type of `q`, or f32. Every element is written.
  // Required.
  const struct regard_tensor *out;
  // f32, the shape of `out` without its last dimension: the natural logarithm of each row's
  // softmax denominator, the sink included; minus infinity for a row that sees nothing. Written
  // if given.
  const struct regard_tensor *lse;
  // `[B, Hq, Lq, Lk]`, any dimension 1 for all. bool: a key is kept where true. f32, f16 or
  // bf16: added to the score in natural units.
  const struct regard_tensor *mask;
  // `[Hq]` f32: minus slope times distance is added to each score.
  const struct regard_tensor *alibi_slopes;
  // `[Hq]` f32: one more logit in each head's softmax denominator.
  const struct regard_tensor *sinks;
  // `[B, Lq, ceil(Lq / 32)]` i32: bit t % 32 of word t / 32 lets a row see new token t (the last
  // Lq keys are the new tokens). Every row sees all earlier keys. Replaces `REGARD_CAUSAL`.
  const struct regard_tensor *tree_mask;
  // `[B]` i32: keys in use of each sequence. Without it, all.
  const struct regard_tensor *kv_lens;
  // `[B]` i32: the position of each sequence's first query row; may be negative. Not together
  // with `REGARD_Q_OFFSET`.
  const struct regard_tensor *q_offsets;
  // `[B + 1]` i32, from 0 to rows: sequence b owns rows `cu_seqlens_q[b]` to `cu_seqlens_q[b +
  // 1]` of `q` and `out`.
  const struct regard_tensor *cu_seqlens_q;
  // `[B + 1]` i32: likewise for `k` and `v`.
  const struct regard_tensor *cu_seqlens_k;
  // `[B, max_blocks]` i32: key j of sequence b is slot j % block_size of block `block_table[b, j
  // / block_size]`. Needs `kv_lens`. Entries that no row can see may hold anything.
  const struct regard_tensor *block_table;
  // `REGARD_CAUSAL` and the others, or-ed. A number below counts only with its option, and must
  // be 0 without it.
  uint32_t options;
  // With `REGARD_SCALE`: multiplies the dot products.
  float scale;
  // With `REGARD_SOFTCAP`: above 0.
  float softcap;
  // With `REGARD_CHUNK`: positions per chunk, from 1 to 2^31 - 1.
  uint32_t chunk;
  // With `REGARD_WINDOW_LEFT`: keys before a query's position that it sees, from 0 up.
  int64_t window_left;
  // With `REGARD_WINDOW_RIGHT`: keys after a query's position that it sees, from 0 up.
  int64_t window_right;
  // With `REGARD_Q_OFFSET`: the position of every sequence's first query row, from -2^31 to
  // 2^31 - 1. 0 aligns the first query with the first key.
  int64_t q_offset;
  // f32: multiplies the codes of keys. Required if `k` is of E4M3, E5M2 or I8, and not given
  // otherwise. The shape of `k` without its last dimension, any of them 1 for all: one scale for
  // the tensor, per head, per block and head, or per token and head. Any strides.
  const struct regard_tensor *k_scales;
  // Likewise of `v`.
  const struct regard_tensor *v_scales;
  // `[rows, Hkv or 1, n]` i32: the keys that each row of `q` attends to, by position. Entries
  // that are negative, or not below the sequence's length, are skipped; each other entry counts
  // once as listed. Without it, rows attend to all keys.
  const struct regard_tensor *key_indices;
  // `[rows, Hkv or 1]` i32: the entries of each list that are used, from its start. Without it,
  // all.
  const struct regard_tensor *key_counts;
  // With `REGARD_KEY_POSITIONS` and without `key_offset`: `[B]` i32, the position of each
  // sequence's first key.
  const struct regard_tensor *key_offsets;
  // With `REGARD_KEY_POSITIONS` and without `key_offsets`: the position of every sequence's
  // first key, from -2^31 to 2^31 - 1.
  int64_t key_offset;
  // With `REGARD_KEY_POSITIONS`: from one key's position to the next one's, from 1 to 2^15.
  int64_t key_stride;
  // `[B]` i32: the prefix group of each sequence, from 0 up; -1 for none. Sequences of a group
  // share their first keys, so the first entries of their rows of `block_table` are equal.
  // Results are the same within the tolerance; the prefix may be read once for all of them.
  const struct regard_tensor *prefix_groups;
  // `[groups]` i32: the keys that the sequences of each group share, at most the length of each.
  // Given together with `prefix_groups`.
  const struct regard_tensor *prefix_lens;
  // `[Hkv or 1, B, n]` i32: the blocks of the pools `k` and `v` that the rows of each sequence
  // attend to, per key/value head or for all of them, instead of a `block_table`. Entries that
  // are no block are skipped.
  const struct regard_tensor *page_indices;
  // `[Hkv or 1, B]` i32: the keys of each list, which end within its last used block. Without
  // it, all slots of the `n` blocks.
  const struct regard_tensor *page_list_lens;
  // The shape of `page_indices`, i32: the number of each listed block in its sequence. Needs
  // `REGARD_Q_OFFSET` or `q_offsets`. Without it, nothing that needs positions may be given.
  const struct regard_tensor *page_numbers;
  // `[blocks, block_size, Hkv, Dk]`: a second pool of keys, of the type of `k`. Its blocks may
  // be of another size.
  const struct regard_tensor *second_k;
  // Likewise of values. Null with `REGARD_VALUES_KEY_PREFIX`: values are in `second_k`.
  const struct regard_tensor *second_v;
  // f32: the scales of `second_k`, as `k_scales` of `k`.
  const struct regard_tensor *second_k_scales;
  // Likewise of `second_v`.
  const struct regard_tensor *second_v_scales;
  // `[rows, Hkv or 1, n]` i32: a second list of each row of `q`, of physical slots of the second
  // pools. One softmax runs over both lists. Needs `key_indices` and `REGARD_INDICES_ARE_SLOTS`.
  const struct regard_tensor *second_indices;
  // `[rows, Hkv or 1]` i32: the entries of each second list that are used. Without it, all.
  const struct regard_tensor *second_counts;
  // With `REGARD_VALUES_KEY_PREFIX`: the last dims of keys, whose first dims are `k` and values.
  // The shape of `k` with Dk - Dv for Dv, of its type and with its scales. Not with `second_k`.
  const struct regard_tensor *rotary_k;
} regard_operands;

// The shape of an attention call: all that a plan depends on, without data. Lengths are upper
// bounds: a plan for them also runs smaller batches and shorter sequences. Set everything to zero,
// `size` to `sizeof(regard_problem)`, and then the fields that you need.
typedef struct regard_problem {
  // `sizeof(regard_problem)`, in bytes.
  size_t size;
  // Sequences.
  int64_t batch;
  // Query heads, a multiple of `kv_heads`.
  int64_t query_heads;
  // Key/value heads.
  int64_t kv_heads;
  // Head dim of queries and keys, 1 to 576.
  int64_t head_dim;
  // Head dim of values and outputs, 1 to 576; 0 for the head dim of the keys.
  int64_t value_dim;
  // The longest query of any sequence.
  int64_t query_len;
  // Maximum keys of a sequence.
  int64_t kv_len;
  // With `REGARD_RAGGED_QUERIES`: rows of all sequences together.
  int64_t query_rows;
  // Slots per block of paged keys and values; 0 for keys that are not paged.
  int64_t block_size;
  // With `REGARD_WINDOW_LEFT`.
  int64_t window_left;
  // With `REGARD_WINDOW_RIGHT`.
  int64_t window_right;
  // The `regard_dtype` of queries, and of keys and values unless noted otherwise below.
  int32_t dtype;
  // Type of the output; 0 for the type of the queries.
  int32_t out_dtype;
  // Type of the mask; 0 for no mask.
  int32_t mask_dtype;
  // `REGARD_CAUSAL` and the others, or-ed.
  uint32_t options;
  // With `REGARD_CHUNK`: positions per chunk, from 1 to 2^31 - 1.
  uint32_t chunk;
  // Must be 0.
  uint32_t reserved;
  // Type of keys; 0 for the type of the queries.
  int32_t key_dtype;
  // Type of values; 0 for the type of the queries.
  int32_t value_dtype;
  // With `REGARD_KEY_LISTS`: entries of the longest list; slots of all its blocks, with
  // `REGARD_LISTS_OF_PAGES`.
  int64_t list_len;
  // With `REGARD_KEY_POSITIONS`: the stride. A plan depends only on whether it is 1.
  int64_t key_stride;
  // Maximum prefix groups: `prefix_lens` will have that many entries. 0 if none are given.
  int64_t prefix_groups;
  // With `REGARD_SECOND_LISTS`: entries of the longest second list.
  int64_t second_list_len;
  // With `REGARD_VALUES_KEY_PREFIX`: the last of `head_dim` dims, which `rotary_k` will have; 0
  // if keys are in one tensor.
  int64_t rotary_dim;
} regard_problem;

// New tokens for a cache. Set everything to zero, `size` to `sizeof(regard_append)`, and then the
// fields that you need.
//
// Sequence b has `kv_lens[b]` tokens afterwards, of which the last are new; each goes to slot
// token % block_size of block `block_table[b, token / block_size]`. Tokens whose entry names no
// block are dropped.
//
// Pools have the type of the new tokens, or a format of 8 or 4 bits that these are quantized to
// after rotation, keys and values independently. See `docs/caches.md` for the rounding.
typedef struct regard_append {
  // `sizeof(regard_append)`, in bytes.
  size_t size;
  // New keys: `[rows, Hkv, Dk]`; f32, f16 or bf16. Required.
  const struct regard_tensor *key;
  // New values: `[rows, Hkv, Dv]`, of that type. Required without `REGARD_APPEND_LATENT`.
  const struct regard_tensor *value;
  // Destination of keys: `[blocks, block_size, Hkv, Dk]`, or `[B, Lk, Hkv, Dk]` without
  // `block_table`; Dk / 32 blocks of q8_0 or q4_0. Written. Required.
  const struct regard_tensor *key_pool;
  // Destination of values: `[blocks, block_size, Hkv, Dv]`, likewise. Written. Required without
  // `REGARD_APPEND_LATENT`.
  const struct regard_tensor *value_pool;
  // `[B, max_blocks]` i32. Null: sequence b is row b of `[B, Lk, Hkv, D]`.
  const struct regard_tensor *block_table;
  // `[B]` i32: tokens of each sequence, the new ones included. Required.
  const struct regard_tensor *kv_lens;
  // `[B + 1]` i32, from 0 to rows: sequence b brings rows `cu_seqlens[b]` to `cu_seqlens[b +
  // 1]`. Without it each brings rows / B.
  const struct regard_tensor *cu_seqlens;
  // Rotary position embedding of the keys on the way: f32 `[positions, dims]`, for every
  // position dims / 2 cosines and then as many sines. The first `dims` of each head are rotated,
  // or with `REGARD_APPEND_LATENT` the last.
  // Tokens at or past `positions` take the last.
  const struct regard_tensor *rotary_table;
  // With `rotary_table`: queries of the same tokens, `[rows, Hq, Dk]`, rotated in place.
  const struct regard_tensor *query;
  // `REGARD_ROTARY_INTERLEAVED` and the options that start with `REGARD_APPEND_`, or-ed.
  uint32_t options;
  // Must be 0.
  uint32_t reserved;
  // Scales of keys in a pool of e4m3, e5m2 or i8, required there and null otherwise: f32,
  // broadcastable to `[blocks, block_size, Hkv]` (each dimension that, or 1). With
  // `REGARD_APPEND_DYNAMIC_K_SCALES` they have exactly that shape, and are written.
  const struct regard_tensor *k_scales;
  // Scales of values, likewise.
  const struct regard_tensor *v_scales;
} regard_append;

// A copy of the first `slots` slots of a block to another block.
typedef struct regard_block_copy {
  // The block to read.
  int64_t from;
  // The block to write.
  int64_t to;
  // Slots, from slot 0.
  int64_t slots;
} regard_block_copy;

// Copies between the blocks of a cache's pools. Set everything to zero, `size` to
// `sizeof(regard_block_copies)`, and then the fields that you need.
//
// Copies are made one after the other, in every pool. Elements are moved and not looked into:
// pools may be of any type. Pools may be interleaved, but no two have an element in common.
typedef struct regard_block_copies {
  // `sizeof(regard_block_copies)`, in bytes.
  size_t size;
  // `pool_count` pointers to tensors: keys, values and scales of all layers, `[blocks,
  // block_size, ...]`, with any further dimensions and any strides. All have as many blocks and
  // slots; a pool with something per block instead of per slot has 1 in place of `block_size`.
  // Written.
  const struct regard_tensor *const *pools;
  // Number of pools.
  size_t pool_count;
  // `copy_count` copies, to be made in this order.
  const struct regard_block_copy *copies;
  // Number of copies.
  size_t copy_count;
} regard_block_copies;

// Partial results over disjoint sets of keys, and the result of their merge. Set everything to
// zero, `size` to `sizeof(regard_merge)`, and then the fields that you need.
//
// On a GPU every tensor is contiguous from the second dimension of the parts on; the CPU takes any
// strides. Rows may be any number of dimensions. A part whose log-sum-exp is minus infinity has
// seen no key: its output is not read. If no part has seen a key, 0 and minus infinity are
// written.
typedef struct regard_merge {
  // `sizeof(regard_merge)`, in bytes.
  size_t size;
  // Each part's output: `[parts, rows, dim]`; f32, f16 or bf16. Required.
  const struct regard_tensor *parts;
  // Their log-sum-exps: f32 `[parts, rows]`. Required.
  const struct regard_tensor *part_lse;
  // The merged output: `[rows, dim]`; f32, f16 or bf16. Written. Required.
  const struct regard_tensor *out;
  // Its log-sum-exp: f32 `[rows]`. Written.
  const struct regard_tensor *lse;
} regard_merge;

// The place of a mask's tile map in the workspace, and its extents: a byte for each sequence,
// head, block of rows and K tile, in this order, without gaps. 0: the mask hides all keys of the
// tile from all rows of the block. 1: it changes no score (on the CPU, of a boolean mask only). 2:
// neither, or not known; results are as right then, but on a GPU not always to the bit.
typedef struct regard_tile_map {
  // `sizeof(regard_tile_map)`, in bytes.
  size_t size;
  // Offset in the workspace, in bytes.
  size_t at;
  // Size of the map, in bytes; 0 if there is none.
  size_t bytes;
  // Sequences; 1 if the mask is the same for all.
  int64_t batch;
  // Query heads, likewise. On Metal, key/value heads.
  int64_t heads;
  // Blocks of rows, likewise.
  int64_t row_blocks;
  // K tiles; on the CPU, likewise.
  int64_t key_tiles;
  // Rows per block. A row is a query token of a head. On Metal rows are packed: row r of a
  // key/value head is token r / group of its query head r % group.
  int64_t block_rows;
  // Keys per tile.
  int64_t tile_keys;
} regard_tile_map;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The library's version, `major.minor.patch`. Never null.
const char *regard_version(void);

// The library's `REGARD_ABI_VERSION`. A program that was compiled against another number must not
// go on.
uint32_t regard_abi_version(void);

// The error message of the last call that failed on this thread, in UTF-8; empty if none has.
// Never null. Valid until the next call fails on this thread.
const char *regard_last_error(void);

// Describes a device in a line of UTF-8 ("host (CPU, avx512, 8 threads)"), or null. Valid until
// the next call of this function on this thread.
const char *regard_machine_facts(const struct regard_device *device);

// Writes to `problem` the problem that operands pose on a device, all of them checked: shapes,
// types, strides, and on the CPU also the contents of lengths and tables. Its lengths are the
// operands' lengths: raise them to your upper bounds before you plan. `problem->size` must be set.
regard_status regard_problem_of(const struct regard_operands *operands,
                                const struct regard_device *device,
                                struct regard_problem *problem);

// Asks if a problem runs on a device: `REGARD_STATUS_OK`, or `REGARD_STATUS_REFUSED` with a
// reason. `reason` may be null; otherwise it is set to the reason, or to null if there is none.
// The text is the text of `regard_last_error`, and is valid as long.
regard_status regard_can_implement(const struct regard_problem *problem,
                                   const struct regard_device *device,
                                   const char **reason);

// Plans a problem for a device and sets `*plan`, to null on failure. `regard_plan_destroy` frees
// it.
regard_status regard_plan_create(const struct regard_problem *problem,
                                 const struct regard_device *device,
                                 struct regard_plan **plan);

// Plans for exactly these operands: `regard_problem_of` and `regard_plan_create` in one.
regard_status regard_plan_for(const struct regard_operands *operands,
                              const struct regard_device *device,
                              struct regard_plan **plan);

// Frees a plan. No run may be using it. Null is allowed.
void regard_plan_destroy(struct regard_plan *plan);

// Bytes of workspace that a run needs: on the CPU at any alignment, on a GPU at a multiple of 16.
// 0 for null.
size_t regard_plan_workspace_bytes(const struct regard_plan *plan);

// Bytes at the start of the workspace that must be zero before its first run; each run leaves them
// zero. 0 on the CPU, and for null.
size_t regard_plan_zeroed_bytes(const struct regard_plan *plan);

// Loads the kernels that the plan runs. Otherwise the first run loads them. Loading takes some
// milliseconds, and cannot be done while a CUDA graph is captured. There is nothing to load on the
// CPU.
regard_status regard_plan_load(const struct regard_plan *plan);

// The kernel of the plan, its settings and their reasons, in a few lines of UTF-8; null for a null
// plan. Valid as long as the plan.
const char *regard_plan_explain(const struct regard_plan *plan);

// Runs a plan on operands. They may be smaller than planned (fewer or shorter sequences), but have
// the planned heads, dims, types and options. `workspace` is memory of the plan's device, at least
// `regard_plan_workspace_bytes` of it, for one run at a time. It needs no initialization but for
// `regard_plan_zeroed_bytes`, and keeps nothing between runs. Outputs and workspace share no
// memory with each other or with an input. If addresses, shapes and strides show that they do, the
// call is an error.
//
// On the CPU the result is there when this returns, and `stream` must be null. On CUDA, `stream`
// is the `CUstream` (or `cudaStream_t`) that the work is put on, null for the default stream, and
// this returns before the work is done. It allocates no device memory and waits for nothing.
// Lengths, offsets and table entries are read when the work runs, so a graph that captured the
// work can be replayed with others. The device's context becomes current on this thread.
//
// On Metal, `workspace` is an `id<MTLBuffer>`, used from its beginning, and `stream` an
// `id<MTLComputeCommandEncoder>`, serial or concurrent, that the work is encoded in. Nothing is
// committed, and nothing is waited for.
regard_status regard_plan_run(const struct regard_plan *plan,
                              const struct regard_operands *operands,
                              void *workspace,
                              size_t workspace_bytes,
                              void *stream);

// Writes new keys and values to a cache: keys rotated on the way if asked for, keys and values
// quantized if the pools have fewer bits. On a GPU this is work on `stream` (a `CUstream` or
// `cudaStream_t`, null for the default stream; on Metal an `id<MTLComputeCommandEncoder>`), and
// lengths and table entries are read when it runs. On the CPU it is done when the call returns,
// and `stream` is null.
regard_status regard_append_run(const struct regard_append *append,
                                const struct regard_device *device,
                                void *stream);

// Loads the kernels that `regard_append_run` runs, as `regard_plan_load` does for a plan.
regard_status regard_append_load(const struct regard_device *device);

// Copies blocks of a cache's pools, as a page allocator asks for before new tokens are appended
// (copy on write). On a GPU this is work on `stream` (a `CUstream` or `cudaStream_t`, null for the
// default stream). On the CPU it is done when the call returns, and `stream` is null. Metal
// refuses it: an `id<MTLBlitCommandEncoder>` copies there.
regard_status regard_copy_blocks(const struct regard_block_copies *copies,
                                 const struct regard_device *device,
                                 void *stream);

// Writes the standard slopes of ALiBi (Press et al. 2021) for `query_heads` heads to `slopes`, an
// array of as many elements: 2^(-8 (h + 1) / n) for n heads if n is a power of two. Otherwise the
// slopes of the largest power of two below n, then every second slope of the next power of two.
// Pass them as `alibi_slopes` of `regard_operands`.
regard_status regard_alibi_slopes(size_t query_heads, float *slopes);

// Merges partial results over disjoint sets of keys (a shared prefix and the keys after it, caches
// spread over devices). On a GPU this is work on `stream` (a `CUstream` or `cudaStream_t`, null
// for the default stream; on Metal an `id<MTLComputeCommandEncoder>`). On the CPU it is done when
// the call returns, and `stream` is null.
regard_status regard_merge_run(const struct regard_merge *merge,
                               const struct regard_device *device,
                               void *stream);

// Loads the kernels that `regard_merge_run` runs, as `regard_plan_load` does for a plan.
regard_status regard_merge_load(const struct regard_device *device);

// Takes compiled pipelines from a file of `regard_device_save_archive`, from now on and in place
// of another such file: pipelines that are in it are not compiled again. Without such a file there
// is nothing to take. `path` is UTF-8. For Metal; the CPU and CUDA ship compiled code, so that
// nothing is read there.
regard_status regard_device_use_archive(const struct regard_device *device, const char *path);

// Writes all pipelines that the device has loaded to a binary archive, in place of a file that is
// there, and their number to `pipelines`, unless that is null. Metal reads it on GPUs and systems
// of the same version; elsewhere pipelines are compiled as if it were empty. `path` is UTF-8. For
// Metal; the CPU and CUDA ship compiled code, so that nothing is written there, and the number is
// 0.
regard_status regard_device_save_archive(const struct regard_device *device,
                                         const char *path,
                                         size_t *pipelines);

// Computes the schedule of a step: the division of decode's work on a GPU, and the sequences that
// share prefixes. All layers of a step have the same lengths, so one call serves all of them:
// `regard_plan_run_scheduled` reads it from the workspace. Of the operands, only shapes, lengths,
// offsets and prefix groups are read. Work on `stream` as `regard_plan_run`; a captured graph can
// have both. On the CPU and on Metal this does nothing.
regard_status regard_plan_schedule(const struct regard_plan *plan,
                                   const struct regard_operands *operands,
                                   void *workspace,
                                   size_t workspace_bytes,
                                   void *stream);

// `regard_plan_run` with the schedule that `regard_plan_schedule` has left in the workspace; the
// same bits. The call of `regard_plan_schedule` came before this one, on the same stream or in
// order with it, with the same plan and workspace, and operands of the same shapes, options,
// lengths, offsets and prefix groups. Since then nothing else has used the workspace but runs with
// that schedule, and nothing has written lengths, offsets, block tables or prefix groups.
regard_status regard_plan_run_scheduled(const struct regard_plan *plan,
                                        const struct regard_operands *operands,
                                        void *workspace,
                                        size_t workspace_bytes,
                                        void *stream);

// Makes the tile map of the mask in the workspace: which tiles of rows and keys the mask hides or
// leaves unchanged. Layers that share a mask make it once, and read it with
// `regard_plan_run_mapped`. Of the operands, only shapes and the mask are read. Work on `stream`
// as `regard_plan_run`; a captured graph can have both. If no map is used
// (`regard_plan_tile_map`), this does nothing.
regard_status regard_plan_map_mask(const struct regard_plan *plan,
                                   const struct regard_operands *operands,
                                   void *workspace,
                                   size_t workspace_bytes,
                                   void *stream);

// `regard_plan_run` with the tile map in the workspace. `regard_plan_map_mask` has made it, on the
// same stream or in order with this call, with the same plan, mask, and operands of the same
// shapes. Or the caller has written it as `regard_plan_tile_map` describes. With the same map, the
// same bits. Runs leave a map as it is. With the map of another mask, results are meaningless.
regard_status regard_plan_run_mapped(const struct regard_plan *plan,
                                     const struct regard_operands *operands,
                                     void *workspace,
                                     size_t workspace_bytes,
                                     void *stream);

// `regard_plan_run` with the prepared parts of the workspace: `prepared` is
// `REGARD_PREPARED_SCHEDULE` (as `regard_plan_run_scheduled`), `REGARD_PREPARED_TILE_MAP` (as
// `regard_plan_run_mapped`), both, or 0.
regard_status regard_plan_run_prepared(const struct regard_plan *plan,
                                       const struct regard_operands *operands,
                                       void *workspace,
                                       size_t workspace_bytes,
                                       void *stream,
                                       uint32_t prepared);

// Writes to `map` the place of the tile map that `regard_plan_run_mapped` reads with these
// operands, for a caller that writes the map. A map of 0 bytes means that none is used: there is
// no mask, kernels for few rows run, or the map would be larger than planned. On CUDA the strides,
// the alignment and the scale of the operands choose between two kernels, whose maps may differ:
// ask for each kind of layer. `map->size` must be set.
regard_status regard_plan_tile_map(const struct regard_plan *plan,
                                   const struct regard_operands *operands,
                                   struct regard_tile_map *map);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* REGARD_H */

#ifndef REGARD_H_TENSORS
#define REGARD_H_TENSORS

// A tensor whose elements are contiguous, the last dimension innermost. `shape` has `rank` numbers.
//
//     const int64_t shape[] = {batch, length, heads, dim};
//     regard_tensor q = regard_contiguous(data, REGARD_DTYPE_BF16, 4, shape);
static inline regard_tensor regard_contiguous(void *data, int32_t dtype, uint32_t rank, const int64_t *shape) {
  regard_tensor tensor;
  uint32_t i;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = rank;
  for (i = 0; i < REGARD_MAX_RANK; i++) {
    tensor.shape[i] = i < rank ? shape[i] : 0;
    tensor.strides[i] = 0;
  }
  tensor.options = 0;
  tensor.reserved = 0;
  tensor.offset = 0;
  return tensor;
}

// A tensor with any strides, in elements; both arrays have `rank` numbers. A stride of 0 repeats the same elements.
static inline regard_tensor regard_strided(void *data, int32_t dtype, uint32_t rank, const int64_t *shape,
                                           const int64_t *strides) {
  regard_tensor tensor = regard_contiguous(data, dtype, rank, shape);
  uint32_t i;
  for (i = 0; i < REGARD_MAX_RANK; i++) {
    tensor.strides[i] = i < rank ? strides[i] : 0;
  }
  tensor.options = REGARD_STRIDED;
  return tensor;
}

// The same tensor, `offset` bytes behind `data`: the place of a tensor in an `id<MTLBuffer>`.
static inline regard_tensor regard_at(regard_tensor tensor, uint64_t offset) {
  tensor.options |= REGARD_OFFSET;
  tensor.offset = offset;
  return tensor;
}

#endif  /* REGARD_H_TENSORS */
