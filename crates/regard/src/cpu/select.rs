//! The CPU kernel for a problem, and its tiles: a table and a pure function.

use super::product::amx;
use super::walk::stream;
use super::walk::tiling::{MAX_TILE_KEYS, Tiling};
use crate::dtype::DType;
use crate::error::Refusal;
use crate::level::{Bf16Products, Level};
use crate::machine::{CpuFacts, Machine};
use crate::problem::Problem;
use crate::select::{Choice, Kernel};
use crate::variant::Values;

/// One line of the table: the tile for Dk + Dv up to `dims`.
struct Line {
    dims: usize,
    tile_keys: usize,
    block_rows: usize,
}

/// A block's queries and outputs (`block_rows * (Dk + Dv)`) and a tile's keys and values
/// (`tile_keys * (Dk + Dv)`), all f32, share a core's L2 cache. Its common size is 1 MiB: each line
/// stays under 3/4 of it.
const TILES: [Line; 4] = [
    Line { dims: 128, tile_keys: 256, block_rows: 512 },
    Line { dims: 256, tile_keys: 256, block_rows: 384 },
    Line { dims: 512, tile_keys: 128, block_rows: 256 },
    Line { dims: 1152, tile_keys: 64, block_rows: 96 },
];

const _: () = {
    let mut i = 0;
    while i < TILES.len() {
        let tile = &TILES[i];
        assert!(tile.tile_keys <= MAX_TILE_KEYS, "a tile is longer than KEY_INDICES");
        assert!(
            tile.tile_keys.is_multiple_of(amx::DEPTH),
            "a tile ends inside a vector, or inside an AMX step"
        );
        assert!(tile.block_rows.is_multiple_of(amx::ROWS), "a block ends inside an AMX tile");
        i += 1;
    }
};

/// The kernel for a problem on a CPU, and its tiles.
///
/// # Errors
/// The reason why no kernel runs the problem on this CPU.
pub fn select(
    problem: &Problem,
    facts: &CpuFacts,
    machine: &Machine,
) -> Result<(Choice, Tiling), Refusal> {
    // The fields are public, so they may disagree. `run` checks that this CPU has the level: a plan
    // may be for another machine.
    if facts.bf16_products != Bf16Products::Widened && facts.level != Level::Avx512 {
        let reason = format!(
            "its facts disagree: bf16 as {} take the level {}, and its level is {}",
            facts.bf16_products,
            Level::Avx512,
            facts.level
        );
        return Err(Refusal { machine: machine.to_string(), reason });
    }
    let dims = problem.head_dim + problem.value_dim;
    // Pairs run along the head dim of keys: with an odd head dim the last element has no partner.
    // Codes, those of blocks too, are exact in bf16; other floats are not.
    let in_bf16 = |dtype: DType| dtype == DType::BF16 || dtype.is_code() || dtype.is_block();
    let caches = [problem.key_dtype, problem.value_dtype];
    let in_blocks = caches.into_iter().any(DType::is_block);
    // Verification multiplies blocks in f32. Walks must not give different bits in
    // batch-invariant mode, and on the matrix unit there is one walk then. Keys and values with one
    // row tile (rows of `mla656` among them) would both be codes.
    let takes_blocks = problem.values != Values::KeyPrefix
        && (!problem.batch_invariant || facts.bf16_products == Bf16Products::Tiles);
    let paired = problem.dtype == DType::BF16
        && problem.head_dim.is_multiple_of(2)
        && caches.into_iter().all(in_bf16)
        && (!in_blocks || takes_blocks);
    let kernel = match facts.bf16_products {
        Bf16Products::Pairs if paired => Kernel::CpuBf16,
        Bf16Products::Tiles if paired => Kernel::CpuAmx,
        _ => Kernel::Cpu(facts.level),
    };
    // The lanes of the kernel's level: streaming reads whole vectors of keys and values in place.
    let lanes = kernel.level().expect("a kernel for CPUs").lanes();
    let exact_dims =
        problem.head_dim.is_multiple_of(lanes) && problem.value_dim.is_multiple_of(lanes);
    let tile = TILES
        .iter()
        .find(|tile| dims <= tile.dims)
        .expect("the last line takes the largest head dim");
    let tiling = Tiling {
        tile_keys: tile.tile_keys,
        block_rows: tile.block_rows,
        stream_rows: if exact_dims && !problem.batch_invariant { stream::MAX_ROWS } else { 0 },
        uses_amx: kernel == Kernel::CpuAmx,
        packs_blocks: in_blocks && kernel != Kernel::Cpu(facts.level),
    };
    let choice = Choice {
        kernel,
        tile_keys: tile.tile_keys,
        block_rows: tile.block_rows,
        reason: format!(
            "Dk + Dv = {dims} <= {}: {} keys per tile and {} rows per block take {} KiB of a \
             core's L2 cache",
            tile.dims,
            tile.tile_keys,
            tile.block_rows,
            ((tile.tile_keys + tile.block_rows) * dims * 4) >> 10
        ),
    };
    Ok((choice, tiling))
}
