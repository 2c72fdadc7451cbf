//! Every struct and enum that a GPU kernel reads, declared once.
//!
//! [`parameters!`](crate::params) makes `#[repr(C)]` Rust structs and `#[repr(i32)]` enums, and their declarations in CUDA and Metal, with
//! the same names and an assertion of each size. Kernels include a generated file; a test compares it with this one.
//! Fields are ordered by size, so that no compiler pads them.

// Comments of fields go into kernels' headers as they stand; `[B]` is a shape there.
#![allow(rustdoc::broken_intra_doc_links)]

use std::fmt::Write;

/// A language that kernels are written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// CUDA C++.
    Cuda,
    /// Metal Shading Language.
    Metal,
}

/// The type of a field: its name in each language.
pub trait FieldType {
    /// In CUDA C++.
    const CUDA: &'static str;
    /// In the Metal Shading Language.
    const METAL: &'static str;
}

macro_rules! field_types {
    ($($type:ty => $cuda:literal, $metal:literal;)*) => {$(
        impl FieldType for $type {
            const CUDA: &'static str = $cuda;
            const METAL: &'static str = $metal;
        }
    )*};
}
field_types! {
    u64 => "unsigned long long", "ulong";
    i64 => "long long", "long";
    u32 => "unsigned int", "uint";
    i32 => "int", "int";
    f32 => "float", "float";
}

/// One value of an enum.
#[derive(Debug, Clone, Copy)]
pub struct Value {
    /// Its name, the same in every language.
    pub name: &'static str,
    /// What it means.
    pub comment: &'static str,
    /// Its number.
    pub number: i32,
}

/// An enum as kernels see it.
#[derive(Debug, Clone, Copy)]
pub struct Enumeration {
    /// Its name, the same in every language.
    pub name: &'static str,
    /// What it says.
    pub comment: &'static str,
    /// Its values, in order.
    pub values: &'static [Value],
}

/// An enum of parameters.
pub trait Enumerated: Copy {
    /// Its declaration.
    const ENUMERATION: Enumeration;
}

/// One field of a struct.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name, the same in every language.
    pub name: &'static str,
    /// What it is.
    pub comment: &'static str,
    /// Its type in CUDA C++.
    pub cuda: &'static str,
    /// Its type in the Metal Shading Language.
    pub metal: &'static str,
    /// Bytes from the struct's start.
    pub offset: usize,
    /// Bytes it takes.
    pub size: usize,
}

/// A struct as kernels see it.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Its name, the same in every language.
    pub name: &'static str,
    /// What it is.
    pub comment: &'static str,
    /// Bytes in all.
    pub size: usize,
    /// Its fields, in order.
    pub fields: &'static [Field],
}

/// A parameter struct.
pub trait Parameters: Copy {
    /// Its declaration.
    const LAYOUT: Layout;
}

/// Declares enums and structs of parameters, each with its documentation.
///
/// A field is a `u64` (an address), `i64`, `u32`, `i32` or `f32`, an enum, or a struct declared before it. An enum's default is its first value.
macro_rules! parameters {
    () => {};
    (
        #[doc = $comment:literal]
        enum $name:ident {
            #[doc = $first_comment:literal]
            $first:ident,
            $(#[doc = $value_comment:literal] $value:ident,)*
        }
        $($rest:tt)*
    ) => {
        #[doc = $comment]
        #[repr(i32)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub enum $name {
            #[doc = $first_comment]
            #[default]
            $first,
            $(#[doc = $value_comment] $value,)*
        }

        impl $crate::params::Enumerated for $name {
            const ENUMERATION: $crate::params::Enumeration = $crate::params::Enumeration {
                name: stringify!($name),
                comment: $comment,
                values: &[
                    $crate::params::Value {
                        name: stringify!($first),
                        comment: $first_comment,
                        number: $name::$first as i32,
                    },
                    $($crate::params::Value {
                        name: stringify!($value),
                        comment: $value_comment,
                        number: $name::$value as i32,
                    },)*
                ],
            };
        }

        impl $crate::params::FieldType for $name {
            const CUDA: &'static str = stringify!($name);
            const METAL: &'static str = stringify!($name);
        }

        $crate::params::parameters! { $($rest)* }
    };
    (
        #[doc = $comment:literal]
        $name:ident { $(#[doc = $field_comment:literal] $field:ident: $type:ty,)* }
        $($rest:tt)*
    ) => {
        #[doc = $comment]
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq)]
        pub struct $name { $(#[doc = $field_comment] pub $field: $type,)* }

        impl $crate::params::Parameters for $name {
            const LAYOUT: $crate::params::Layout = $crate::params::Layout {
                name: stringify!($name),
                comment: $comment,
                size: size_of::<$name>(),
                fields: &[$($crate::params::Field {
                    name: stringify!($field),
                    comment: $field_comment,
                    cuda: <$type as $crate::params::FieldType>::CUDA,
                    metal: <$type as $crate::params::FieldType>::METAL,
                    offset: std::mem::offset_of!($name, $field),
                    size: size_of::<$type>(),
                },)*],
            };
        }

        impl $crate::params::FieldType for $name {
            const CUDA: &'static str = stringify!($name);
            const METAL: &'static str = stringify!($name);
        }

        $crate::params::parameters! { $($rest)* }
    };
}
pub(crate) use parameters;

impl Enumeration {
    /// The enum as text, the same in CUDA C++ and the Metal Shading Language.
    pub fn declaration(&self) -> String {
        let mut text = format!("//{}\nenum class {} : int {{\n", self.comment, self.name);
        for Value { name, comment, number } in self.values {
            writeln!(text, "    {name} = {number}, //{comment}")
                .expect("writing to a String cannot fail");
        }
        text.push_str("};\n");
        text
    }
}

impl Layout {
    /// The struct as text, with an assertion of its size.
    pub fn declaration(&self, language: Language) -> String {
        let mut text = String::new();
        let mut line =
            |line: String| writeln!(text, "{line}").expect("writing to a String cannot fail");
        line(format!("//{}", self.comment));
        line(format!("struct {} {{", self.name));
        for field in self.fields {
            let name = match language {
                Language::Cuda => field.cuda,
                Language::Metal => field.metal,
            };
            line(format!("    {name} {}; //{}", field.name, field.comment));
        }
        line("};".into());
        line(format!(
            "static_assert(sizeof({}) == {}, \"as the host has it\");",
            self.name, self.size
        ));
        // Offsets need no assertion of their own: fields lie without gaps, which the sum of their sizes shows on the host.
        text
    }

    /// Bytes that the fields take, without any padding.
    pub fn packed_size(&self) -> usize {
        self.fields.iter().map(|field| field.size).sum()
    }
}

parameters! {
    #[doc = " The type of elements in memory."]
    enum ElementType {
        #[doc = " IEEE half precision."]
        F16,
        #[doc = " bfloat16."]
        BF16,
        #[doc = " IEEE single precision."]
        F32,
    }
    #[doc = " Where the position of a sequence's first row comes from."]
    enum OffsetKind {
        #[doc = " Bottom right: the last row is at the last key."]
        BottomRight,
        #[doc = " `q_offset`, the same for all sequences."]
        Same,
        #[doc = " `q_offsets`, one per sequence."]
        PerSequence,
    }
    #[doc = " The mask, and the type of its elements. From F32 on it is additive."]
    enum MaskKind {
        #[doc = " No mask."]
        None,
        #[doc = " Boolean: keys whose byte is 0 are hidden."]
        Bool,
        #[doc = " Additive, f32."]
        F32,
        #[doc = " Additive, f16."]
        F16,
        #[doc = " Additive, bf16."]
        BF16,
    }
    #[doc = " How rows of keys and values can be loaded."]
    enum LoadKind {
        #[doc = " Element by element: rows are not 16-byte aligned."]
        Elements,
        #[doc = " In 16-byte chunks."]
        Chunks,
        #[doc = " In 16-byte chunks, 16 contiguous keys at a time, in rows of exactly the compiled dims."]
        PageAligned16,
    }
    #[doc = " A byte of the tile map of a mask: what the mask does to the scores of a K tile."]
    enum MapKind {
        #[doc = " It hides all of them."]
        Empty,
        #[doc = " It changes none of them."]
        Full,
        #[doc = " Neither."]
        Mixed,
    }
    #[doc = " How keys or values are stored."]
    enum CacheFormat {
        #[doc = " IEEE half precision."]
        F16,
        #[doc = " bfloat16."]
        BF16,
        #[doc = " IEEE single precision."]
        F32,
        #[doc = " fp8, 4 bits of exponent and 3 of mantissa (e4m3fn: no infinity)."]
        E4M3,
        #[doc = " fp8, 5 bits of exponent and 2 of mantissa."]
        E5M2,
        #[doc = " Signed 8-bit integers."]
        I8,
        #[doc = " GGUF q8_0: blocks of an f16 scale and 32 signed bytes."]
        Q8_0,
        #[doc = " GGUF q4_0: blocks of an f16 scale and 32 nibbles less 8."]
        Q4_0,
    }
    #[doc = " Strides of rows."]
    RowStrides {
        #[doc = " From one sequence (0 where ragged) or block to the next."]
        batch: i64,
        #[doc = " From one token or slot to the next."]
        token: i64,
        #[doc = " From one head to the next."]
        head: i64,
    }
    #[doc = " Strides of a mask; 0 where a dimension is 1."]
    MaskStrides {
        #[doc = " From one sequence to the next."]
        batch: i64,
        #[doc = " From one head to the next."]
        head: i64,
        #[doc = " From one row to the next."]
        row: i64,
        #[doc = " From one key to the next."]
        key: i64,
    }
    #[doc = " Strides of tree bits, in words."]
    TreeStrides {
        #[doc = " From one sequence to the next."]
        batch: i64,
        #[doc = " From one row to the next."]
        row: i64,
    }
    #[doc = " Strides of the tile map of a mask, in bytes; 0 where the mask is the same for all."]
    MapStrides {
        #[doc = " From one sequence to the next."]
        batch: i64,
        #[doc = " From one query head to the next."]
        head: i64,
        #[doc = " From one row tile to the next."]
        row: i64,
    }
    #[doc = " Strides of the tokens of a ragged batch."]
    TokenStrides {
        #[doc = " From one token to the next."]
        token: i64,
        #[doc = " From one head to the next."]
        head: i64,
    }
    #[doc = " Strides of a pool of blocks."]
    PoolStrides {
        #[doc = " From one block to the next."]
        block: i64,
        #[doc = " From one slot to the next."]
        slot: i64,
        #[doc = " From one head to the next."]
        head: i64,
    }
    #[doc = " One attention call, for decode and prefill. An address may be 0 (none); strides are in elements."]
    AttentionParameters {
        #[doc = " Queries: [B, Lq, Hq, Dk], or [total, Hq, Dk]."]
        query: u64,
        #[doc = " Keys: [B, Lk, Hkv, Dk], [total, Hkv, Dk] or [blocks, block_size, Hkv, Dk]."]
        key: u64,
        #[doc = " Values, like the keys."]
        value: u64,
        #[doc = " Output, like the queries."]
        out: u64,
        #[doc = " Log-sum-exp of each row, f32."]
        lse: u64,
        #[doc = " Mask [B, Hq, Lq, Lk] of the type that `mask_kind` says."]
        mask: u64,
        #[doc = " ALiBi slopes, f32 [Hq]."]
        alibi_slopes: u64,
        #[doc = " Sinks, f32 [Hq]."]
        sinks: u64,
        #[doc = " Tree bits, i32 [B, Lq, words]."]
        tree_mask: u64,
        #[doc = " Keys in use, i32 [B]."]
        kv_lens: u64,
        #[doc = " Cumulative query lengths, i32 [B + 1]."]
        cu_seqlens_q: u64,
        #[doc = " Cumulative key lengths, i32 [B + 1]."]
        cu_seqlens_k: u64,
        #[doc = " Block table, i32 [B, blocks]."]
        block_table: u64,
        #[doc = " Positions of the first rows, i32 [B]."]
        q_offsets: u64,
        #[doc = " Workspace: counters, then partial states."]
        workspace: u64,
        #[doc = " Workspace: the CTAs of each tile, for `join`; 0 if the last CTA combines them."]
        partial_ranges: u64,
        #[doc = " Queries."]
        query_strides: RowStrides,
        #[doc = " Keys."]
        key_strides: RowStrides,
        #[doc = " Values."]
        value_strides: RowStrides,
        #[doc = " Output."]
        out_strides: RowStrides,
        #[doc = " Log-sum-exp."]
        lse_strides: RowStrides,
        #[doc = " Mask."]
        mask_strides: MaskStrides,
        #[doc = " Tree bits."]
        tree_strides: TreeStrides,
        #[doc = " Block table: from one sequence to the next."]
        block_table_stride: i64,
        #[doc = " Keys that a row sees to the left of its position; the largest value for no bound."]
        window_left: i64,
        #[doc = " Keys to the right, likewise; causality is a bound of 0."]
        window_right: i64,
        #[doc = " Chunked attention: positions per chunk; 0 if positions are not divided."]
        chunk: i64,
        #[doc = " 2^64 over `chunk`, rounded up."]
        chunk_inverse: u64,
        #[doc = " The position of every first row, if `offset_kind` is Same."]
        q_offset: i64,
        #[doc = " Stream-K: work of all tiles if the host knows that all lengths are equal; else 0."]
        work_total: i64,
        #[doc = " Stream-K: work per CTA."]
        work_per_cta: i64,
        #[doc = " Stream-K: work per tile, if `work_total` is given."]
        work_per_tile: i64,
        #[doc = " Multiplies dot products."]
        scale: f32,
        #[doc = " Bounds scores; 0 where there is no cap."]
        softcap: f32,
        #[doc = " Sequences."]
        batch: i32,
        #[doc = " Key/value heads."]
        kv_heads: i32,
        #[doc = " Query heads that share one of them."]
        group: i32,
        #[doc = " Dk."]
        head_dim: i32,
        #[doc = " Dv."]
        value_dim: i32,
        #[doc = " The longest query of any sequence; where ragged, rows there are in all."]
        query_len: i32,
        #[doc = " The most keys of any sequence; where ragged, rows there are in all."]
        kv_len: i32,
        #[doc = " Slots per page, 0 if keys are not paged."]
        block_size: i32,
        #[doc = " Pages in the pool."]
        blocks: i32,
        #[doc = " Where positions come from."]
        offset_kind: OffsetKind,
        #[doc = " The mask and its type."]
        mask_kind: MaskKind,
        #[doc = " Whether the output is f32 though the inputs are not."]
        out_f32: i32,
        #[doc = " log2 of the slots per page, -1 if that is no power of 2."]
        block_shift: i32,
        #[doc = " How queries, keys and values are loaded."]
        load_kind: LoadKind,
        #[doc = " Whether scores are dot products times the scale: no softcap, slopes or additive mask."]
        unmodified_scores: i32,
        #[doc = " Whether four elements of the output can be written at once."]
        out_aligned: i32,
        #[doc = " log2 of the keys per unit of work."]
        work_unit_shift: i32,
        #[doc = " Units of work for starting a tile."]
        tile_start_work: i32,
        #[doc = " Whether keys are split at fixed places."]
        batch_invariant: i32,
        #[doc = " Partial states that one CTA may leave."]
        partials_per_cta: i32,
        #[doc = " Groups of warps that share the keys of a CTA."]
        key_groups: i32,
        #[doc = " Longer sequences belong to the prefill launch; the largest value for none."]
        max_query_len: i32,
        #[doc = " The most query tokens of a ragged sequence; lengths are clamped to it."]
        query_len_bound: i32,
        #[doc = " The most keys of a ragged sequence, likewise."]
        kv_len_bound: i32,
    }
    #[doc = " What the prefill kernels read besides: the tile scheduler, and the tile map of a mask."]
    PrefillParameters {
        #[doc = " Workspace: u32 next tile, u32 finished CTAs; zero before and after a run."]
        counters: u64,
        #[doc = " Workspace: the tile map of a mask, one MapKind byte per K tile; 0 for none."]
        tile_map: u64,
        #[doc = " Map."]
        map_strides: MapStrides,
        #[doc = " Tiles in all if the host knows that all query lengths are equal; else 0."]
        tiles: i64,
        #[doc = " Row tiles of each (sequence, query head), where `tiles` is given."]
        row_tiles: i32,
        #[doc = " (sequence, key/value head) pairs whose keys and values fit the L2 cache together."]
        l2_group: i32,
        #[doc = " Shorter sequences belong to the decode launch; 0 for none."]
        min_query_len: i32,
        #[doc = " Keys per TMA box; divides both K tiles and pages."]
        box_keys: i32,
        #[doc = " Query tokens per row tile of the map."]
        map_rows: i32,
        #[doc = " Keys per K tile of the map."]
        map_keys: i32,
        #[doc = " Sequences in the map: 1 where the mask is the same for all."]
        map_batch: i32,
        #[doc = " Query heads in the map, likewise."]
        map_heads: i32,
        #[doc = " Row tiles in the map, likewise."]
        map_row_tiles: i32,
        #[doc = " K tiles in the map: bytes per row of it."]
        map_key_tiles: i32,
        #[doc = " Rows of the mask per sequence and head; the last row tile may extend past them."]
        mask_rows: i32,
        #[doc = " Keys of the mask, likewise."]
        mask_keys: i32,
    }
    #[doc = " What `append` reads: new keys and values, and their places in the pages."]
    AppendParameters {
        #[doc = " New keys [total, Hkv, Dk]."]
        key: u64,
        #[doc = " New values [total, Hkv, Dv]."]
        value: u64,
        #[doc = " Pool of keys [blocks, block_size, Hkv, Dk]."]
        key_pool: u64,
        #[doc = " Pool of values."]
        value_pool: u64,
        #[doc = " Queries to rotate in place [total, Hq, Dk]; 0 for none."]
        query: u64,
        #[doc = " Cosines and sines, f32 [positions, rotary_dim]: cosines first; 0 for no rotation."]
        rotary: u64,
        #[doc = " Block table, i32 [B, blocks]."]
        block_table: u64,
        #[doc = " Tokens of each sequence after appending, i32 [B]."]
        kv_lens: u64,
        #[doc = " Cumulative new lengths, i32 [B + 1]; 0 if every sequence has `new_tokens`."]
        cu_seqlens: u64,
        #[doc = " New keys."]
        key_strides: TokenStrides,
        #[doc = " New values."]
        value_strides: TokenStrides,
        #[doc = " Queries."]
        query_strides: TokenStrides,
        #[doc = " Pool of keys."]
        key_pool_strides: PoolStrides,
        #[doc = " Pool of values."]
        value_pool_strides: PoolStrides,
        #[doc = " Block table: from one sequence to the next."]
        block_table_stride: i64,
        #[doc = " Sequences."]
        batch: i32,
        #[doc = " Tokens in all."]
        tokens: i32,
        #[doc = " New tokens of each sequence where there is no `cu_seqlens`."]
        new_tokens: i32,
        #[doc = " Key/value heads."]
        kv_heads: i32,
        #[doc = " Query heads; 0 where no queries are rotated."]
        query_heads: i32,
        #[doc = " Dk."]
        head_dim: i32,
        #[doc = " Dv."]
        value_dim: i32,
        #[doc = " Leading dimensions that are rotated: even, at most Dk; 0 for none."]
        rotary_dim: i32,
        #[doc = " Whether RoPE pairs adjacent dims (1) or halves (0)."]
        rotary_interleaved: i32,
        #[doc = " Positions that the table of cosines and sines covers."]
        rotary_positions: i32,
        #[doc = " Slots per page."]
        block_size: i32,
        #[doc = " Pages in the pool."]
        blocks: i32,
        #[doc = " Entries of a sequence's page table."]
        table_blocks: i32,
        #[doc = " Bytes of an element: 2 or 4."]
        element_bytes: i32,
        #[doc = " Type of an element."]
        element_type: ElementType,
        #[doc = " Unused, so that no compiler pads."]
        unused: i32,
    }
    #[doc = " What `merge` reads: partial results over disjoint sets of keys."]
    MergeParameters {
        #[doc = " Partial outputs [parts, rows, dim]."]
        parts: u64,
        #[doc = " Their log-sum-exps, f32 [parts, rows]."]
        part_lse: u64,
        #[doc = " Output [rows, dim]."]
        out: u64,
        #[doc = " Its log-sum-exp, f32 [rows]; 0 for none."]
        lse: u64,
        #[doc = " From one part's output to the next."]
        part_stride: i64,
        #[doc = " From one part's log-sum-exp to the next."]
        part_lse_stride: i64,
        #[doc = " Rows."]
        rows: i64,
        #[doc = " Elements per row."]
        dim: i32,
        #[doc = " Parts."]
        count: i32,
        #[doc = " Type of parts."]
        part_type: ElementType,
        #[doc = " Type of the output."]
        out_type: ElementType,
    }
    #[doc = " How the keys and values of a call are stored, where that is not as elements of the queries' type. Strides of block types are in blocks."]
    CacheParameters {
        #[doc = " Scales of keys, f32 [blocks or B, slots or Lk, Hkv]; 0 where the format has none."]
        key_scales: u64,
        #[doc = " Scales of values, likewise."]
        value_scales: u64,
        #[doc = " Scales of keys; 0 where broadcast."]
        key_scale_strides: RowStrides,
        #[doc = " Scales of values, likewise."]
        value_scale_strides: RowStrides,
        #[doc = " Format of keys."]
        key_format: CacheFormat,
        #[doc = " Format of values."]
        value_format: CacheFormat,
        #[doc = " Type of queries, and of the output unless that is f32."]
        query_type: ElementType,
        #[doc = " Unused, so that no compiler pads."]
        unused: i32,
    }
}

/// Every enum that a CUDA kernel reads.
const CUDA_ENUMS: [Enumeration; 6] = [
    ElementType::ENUMERATION,
    OffsetKind::ENUMERATION,
    MaskKind::ENUMERATION,
    LoadKind::ENUMERATION,
    MapKind::ENUMERATION,
    CacheFormat::ENUMERATION,
];

/// Every struct that a CUDA kernel reads, parts first.
const CUDA: [Layout; 11] = [
    RowStrides::LAYOUT,
    MaskStrides::LAYOUT,
    TreeStrides::LAYOUT,
    MapStrides::LAYOUT,
    TokenStrides::LAYOUT,
    PoolStrides::LAYOUT,
    AttentionParameters::LAYOUT,
    PrefillParameters::LAYOUT,
    AppendParameters::LAYOUT,
    MergeParameters::LAYOUT,
    CacheParameters::LAYOUT,
];

/// What the driver makes of the description of a tensor, for copies by the GPU's own engine (`CUtensorMap`).
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap(pub [u8; 128]);

/// The TMA descriptors of the Hopper prefill kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMaps {
    /// Queries.
    pub query: TensorMap,
    /// Keys.
    pub key: TensorMap,
    /// Values.
    pub value: TensorMap,
    /// Output.
    pub out: TensorMap,
}

/// The same for kernels.
const TENSOR_MAPS: &str = "\
// A TMA descriptor (CUtensorMap).
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};
static_assert(sizeof(TensorMap) == 128, \"as the host has it\");

// The TMA descriptors of the Hopper prefill kernels.
struct TensorMaps {
    TensorMap query, key, value, out;
};
static_assert(sizeof(TensorMaps) == 512, \"as the host has it\");
";

/// The generated header beside the CUDA kernels.
pub fn cuda_header() -> String {
    let mut text = String::from(
        "// Generated from crates/regard/src/params.rs: REGARD_WRITE_PARAMETERS=1 cargo test -p regard params. Do not edit.\n#pragma once\n",
    );
    let enums = CUDA_ENUMS.iter().map(Enumeration::declaration);
    let structs = CUDA.iter().map(|layout| layout.declaration(Language::Cuda));
    for declaration in enums.chain(structs) {
        text.push('\n');
        text.push_str(&declaration);
    }
    text.push('\n');
    text.push_str(TENSOR_MAPS);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_padded() {
        for layout in CUDA {
            assert_eq!(layout.size, layout.packed_size(), "{}", layout.name);
            let mut offset = 0;
            for field in layout.fields {
                assert_eq!(field.offset, offset, "{}.{}", layout.name, field.name);
                offset += field.size;
            }
        }
    }

    parameters! {
        #[doc = " A choice."]
        enum Choice {
            #[doc = " The default."]
            First,
            #[doc = " The other."]
            Second,
        }
        #[doc = " A part."]
        Part {
            #[doc = " Steps."]
            step: i64,
        }
        #[doc = " A whole."]
        Whole {
            #[doc = " Its part."]
            part: Part,
            #[doc = " Its choice."]
            choice: Choice,
            #[doc = " A count."]
            count: u32,
        }
    }

    #[test]
    fn every_language_has_the_same_names() {
        assert_eq!(Whole::default().choice, Choice::First);
        assert_eq!(Choice::Second as i32, 1);
        let choice = "// A choice.\nenum class Choice : int {\n    First = 0, // The default.\n    Second = 1, // The other.\n};\n";
        assert_eq!(Choice::ENUMERATION.declaration(), choice);
        for (language, long, unsigned) in
            [(Language::Cuda, "long long", "unsigned int"), (Language::Metal, "long", "uint")]
        {
            let part = format!(
                "// A part.\nstruct Part {{\n    {long} step; // Steps.\n}};\nstatic_assert(sizeof(Part) == 8, \"as the host has it\");\n"
            );
            let whole = format!(
                "// A whole.\nstruct Whole {{\n    Part part; // Its part.\n    Choice choice; // Its choice.\n    {unsigned} count; // A count.\n}};\nstatic_assert(sizeof(Whole) == 16, \"as the host has it\");\n"
            );
            assert_eq!(Part::LAYOUT.declaration(language), part);
            assert_eq!(Whole::LAYOUT.declaration(language), whole);
        }
    }

    #[test]
    fn tensor_maps_are_as_large_as_kernels_have_them() {
        assert_eq!((size_of::<TensorMap>(), align_of::<TensorMap>()), (128, 64));
        assert_eq!(size_of::<TensorMaps>(), 512);
    }

    #[test]
    fn the_header_beside_the_kernels_is_this_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels/common/parameters.cuh");
        if std::env::var_os("REGARD_WRITE_PARAMETERS").is_some() {
            std::fs::write(path, cuda_header()).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap();
        assert!(
            found == cuda_header(),
            "REGARD_WRITE_PARAMETERS=1 cargo test -p regard params writes it"
        );
    }
}
