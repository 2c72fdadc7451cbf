//! Appending to caches, copying their blocks and merging partial results: the callers'
//! descriptions, in memory of any kind.

use crate::convert::{Options, Place, bad, count, expect_zero, input, output, required};
use crate::status::Failure;
use crate::types::{
    self, REGARD_APPEND_DYNAMIC_K_SCALES, REGARD_APPEND_DYNAMIC_V_SCALES, REGARD_APPEND_LATENT,
    REGARD_ROTARY_INTERLEAVED, Tensor,
};
use regard::paged::BlockCopy;
use regard::{Append, AppendLatent, AppendScales, Merge, Rotary, TensorMut};

/// New tokens for a cache.
#[expect(clippy::large_enum_variant, reason = "one per call, on the stack")]
pub enum NewTokens<'a, M: Place> {
    /// Keys and values.
    Separate(Append<'a, M>),
    /// Rows of a latent cache.
    Latent(AppendLatent<'a, M>),
}

/// A caller's append.
///
/// # Safety
/// The tensors can be read, and describe memory as [`Place`] wants it.
pub unsafe fn append<'a, M: Place>(given: &types::Append) -> Result<NewTokens<'a, M>, Failure> {
    let known = REGARD_ROTARY_INTERLEAVED
        | REGARD_APPEND_LATENT
        | REGARD_APPEND_DYNAMIC_K_SCALES
        | REGARD_APPEND_DYNAMIC_V_SCALES;
    let options = Options::new("append", given.options, known)?;
    expect_zero("append.reserved", given.reserved)?;
    let (dynamic_k, dynamic_v) =
        (options.has(REGARD_APPEND_DYNAMIC_K_SCALES), options.has(REGARD_APPEND_DYNAMIC_V_SCALES));
    // SAFETY: passed on.
    let read = |name, tensor| unsafe { input::<M>(name, tensor) };
    // SAFETY: passed on.
    let written = |name, tensor| unsafe { output::<M>(name, tensor) };
    let rows = AppendLatent {
        key: required("key", read("key", given.key)?)?,
        key_pool: required("key_pool", written("key_pool", given.key_pool)?)?,
        // SAFETY: passed on.
        k_scales: unsafe { scales("k_scales", given.k_scales, dynamic_k)? },
        block_table: read("block_table", given.block_table)?,
        kv_lens: required("kv_lens", read("kv_lens", given.kv_lens)?)?,
        cu_seqlens: read("cu_seqlens", given.cu_seqlens)?,
        // SAFETY: passed on.
        rotary: unsafe { rotary(given, &options)? },
    };
    let (value, value_pool) =
        (read("value", given.value)?, written("value_pool", given.value_pool)?);
    // SAFETY: passed on.
    let v_scales = unsafe { scales("v_scales", given.v_scales, dynamic_v)? };
    if !options.has(REGARD_APPEND_LATENT) {
        return Ok(NewTokens::Separate(Append {
            key: rows.key,
            value: required("value", value)?,
            key_pool: rows.key_pool,
            value_pool: required("value_pool", value_pool)?,
            k_scales: rows.k_scales,
            v_scales,
            block_table: rows.block_table,
            kv_lens: rows.kv_lens,
            cu_seqlens: rows.cu_seqlens,
            rotary: rows.rotary,
        }));
    }
    let given = [
        ("value", value.is_some()),
        ("value_pool", value_pool.is_some()),
        ("v_scales", v_scales.is_some()),
    ];
    match given.into_iter().find(|&(_, given)| given) {
        Some((name, _)) => Err(bad(name, "given with REGARD_APPEND_LATENT", "null")),
        None => Ok(NewTokens::Latent(rows)),
    }
}

/// The rotary embedding of an append, if it has one.
///
/// # Safety
/// As [`append`].
unsafe fn rotary<'a, M: Place>(
    given: &types::Append,
    options: &Options,
) -> Result<Option<Rotary<'a, M>>, Failure> {
    // SAFETY: passed on.
    let (table, query) =
        unsafe { (input("rotary_table", given.rotary_table)?, output::<M>("query", given.query)?) };
    let interleaved = options.has(REGARD_ROTARY_INTERLEAVED);
    match table {
        Some(table) => Ok(Some(Rotary { table, interleaved, query })),
        None if query.is_some() => Err(bad("query", "given without rotary_table", "null, or both")),
        None if interleaved => Err(bad(
            "append.options",
            "REGARD_ROTARY_INTERLEAVED without rotary_table",
            "0, or both",
        )),
        None => Ok(None),
    }
}

/// Scales of a pool, if there are any: written with the option for dynamic ones, else read.
///
/// # Safety
/// As [`append`].
unsafe fn scales<'a, M: Place>(
    name: &str,
    tensor: *const Tensor,
    dynamic: bool,
) -> Result<Option<AppendScales<'a, M>>, Failure> {
    if !dynamic {
        // SAFETY: passed on.
        return Ok(unsafe { input(name, tensor)? }.map(AppendScales::Static));
    }
    // SAFETY: passed on.
    let tensor = required(name, unsafe { output(name, tensor)? })?;
    Ok(Some(AppendScales::Dynamic(tensor)))
}

/// A caller's merge.
///
/// # Safety
/// As [`append`].
pub unsafe fn merge<'a, M: Place>(given: &types::Merge) -> Result<Merge<'a, M>, Failure> {
    // SAFETY: passed on.
    let read = |name, tensor| unsafe { input(name, tensor) };
    // SAFETY: passed on.
    let written = |name, tensor| unsafe { output(name, tensor) };
    Ok(Merge {
        parts: required("parts", read("parts", given.parts)?)?,
        part_lse: required("part_lse", read("part_lse", given.part_lse)?)?,
        out: required("out", written("out", given.out)?)?,
        lse: written("lse", given.lse)?,
    })
}

/// The pools and copies of a caller.
pub type PoolsAndCopies<'a, M> = (Vec<TensorMut<'a, M>>, Vec<BlockCopy>);

/// A caller's copies of blocks.
///
/// # Safety
/// As [`append`], and the arrays have as many elements as is said.
pub unsafe fn block_copies<'a, M: Place>(
    given: &types::BlockCopies,
) -> Result<PoolsAndCopies<'a, M>, Failure> {
    let (mut pools, mut copies) = (Vec::new(), Vec::new());
    for (name, is_null, count) in [
        ("pools", given.pools.is_null(), given.pool_count),
        ("copies", given.copies.is_null(), given.copy_count),
    ] {
        if is_null && count > 0 {
            return Err(bad(name, "null", format!("an array of {count}")));
        }
    }
    for i in 0..given.pool_count {
        let name = format!("pools[{i}]");
        // SAFETY: passed on.
        let pool = unsafe { output(&name, given.pools.add(i).read_unaligned())? };
        pools.push(required(&name, pool)?);
    }
    for i in 0..given.copy_count {
        // SAFETY: passed on.
        let copy = unsafe { given.copies.add(i).read_unaligned() };
        copies.push(BlockCopy {
            from: count(&format!("copies[{i}].from"), copy.from)?,
            to: count(&format!("copies[{i}].to"), copy.to)?,
            slots: count(&format!("copies[{i}].slots"), copy.slots)?,
        });
    }
    Ok((pools, copies))
}
