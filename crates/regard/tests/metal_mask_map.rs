//! The tile map of a mask: the kinds that the kernel finds, and that attention with the map has the
//! bits of attention without.

#[path = "support/metal.rs"]
mod support;

use metal_host::{Build, Library, operand, operand_mut, run_plan};
use regard::metal::{self, Dispatch, Params, TileMap};
use regard::{DType, Error, Inputs, Machine, Outputs, Plan, Problem};
use regard_cases::rows::bits;
use regard_cases::{Array, Case, Hide, Keys, MaskSpec, Output, Spec};
use support::{compiler, for_all, gpu, run, source_of};

/// The origin of a tile map.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Map {
    /// Made by the kernel.
    Made,
    /// There is none.
    Without,
    /// Written by the caller, whose workspace it is in.
    Given,
}

/// Tile kinds as [`TileMap`] lists them.
const EMPTY: u8 = 0;
const FULL: u8 = 1;
const MIXED: u8 = 2;

/// The mask of a case in tiles: hidden, kept, and one by one in turn, along diagonals. Three heads,
/// as many as a group, have the same.
fn tiled(case: &mut Case, dtype: DType) {
    let mask = case.attention.mask.as_mut().expect("the spec has a mask");
    let shape = mask.shape().to_vec();
    let [rows, keys] = [shape[2], shape[3]];
    let count: usize = shape.iter().product();
    let hidden = |index: usize| {
        let (row, key) = (index / keys % rows, index % keys);
        match (row / 64 + key / 32 + index / keys / rows / 3) % 3 {
            0 => true,
            1 => false,
            _ => (row + key) % 3 == 0,
        }
    };
    let number = |index: usize| match (dtype, hidden(index)) {
        (DType::Bool, hidden) => f64::from(u8::from(!hidden)),
        (_, true) => f64::NEG_INFINITY,
        (_, false) => 0.0,
    };
    let data = regard_cases::Data::from_numbers(dtype, (0..count).map(number));
    *mask = Array::new(data, &shape).expect("as many elements");
}

/// The map by its definition, over all elements of a block's tokens and heads.
fn expected(map: &TileMap, case: &Case, dtype: DType, group: usize) -> Vec<u8> {
    let mask = case.attention.mask.as_ref().expect("a mask");
    let [batch, heads, rows, keys] = mask.shape()[..] else { panic!("four dimensions") };
    let numbers = mask.numbers().expect("numbers");
    let mut kinds = Vec::new();
    for sequence in 0..map.batch {
        for head in 0..map.heads {
            for block in 0..map.row_blocks {
                for tile in 0..map.key_tiles {
                    let first = block * map.block_rows;
                    let tokens =
                        first / group..=((first + map.block_rows - 1) / group).min(rows - 1);
                    let (mut keeps, mut changes) = (false, false);
                    for token in tokens {
                        for query in 0..if heads == 1 { 1 } else { group } {
                            let row = ((sequence % batch * heads + head * group + query) * rows
                                + token)
                                * keys;
                            for key in tile * map.tile_keys..((tile + 1) * map.tile_keys).min(keys)
                            {
                                let number = numbers[row + key];
                                let hides = number
                                    == if dtype == DType::Bool { 0.0 } else { f64::NEG_INFINITY };
                                keeps |= !hides;
                                changes |= hides || (dtype != DType::Bool && number != 0.0);
                            }
                        }
                    }
                    kinds.push(if !keeps {
                        EMPTY
                    } else if changes {
                        MIXED
                    } else {
                        FULL
                    });
                }
            }
        }
    }
    kinds
}

/// The map that a plan would make.
fn map_of(plan: &Plan, inputs: &Inputs, outputs: &mut Outputs) -> Result<TileMap, Error> {
    let inputs = inputs.try_map(|_, tensor| operand(&tensor))?;
    let out = operand_mut(&mut outputs.out)?;
    let lse = outputs.lse.as_mut().map(operand_mut).transpose()?;
    let map = metal::tile_map(plan, &inputs, &Outputs { out, lse })?;
    Ok(map.expect("prefill under a mask has a map"))
}

/// Without a map.
fn unmapped(dispatch: &Dispatch) -> Dispatch {
    let mut dispatch = *dispatch;
    if let Params::Attention(params) = &mut dispatch.params {
        params.map = metal::MapParameters::default();
    }
    dispatch
}

/// The bytes of a map that a dispatch writes or reads.
fn bytes<'a>(dispatch: &Dispatch) -> &'a mut [u8] {
    let map = dispatch.buffers[18].expect("the map is bound");
    // SAFETY: it is in the workspace of the run, and nothing else uses it between dispatches.
    unsafe { std::slice::from_raw_parts_mut(map.address as *mut u8, map.bytes) }
}

/// Runs a case, and compares the map that is made with its definition.
fn run_with(
    library: &mut Library,
    (case, dtype, group): (&Case, DType, usize),
    machine: &Machine,
    map: Map,
) -> Output {
    let output = case.run(|inputs, outputs: &mut Outputs| -> Result<(), Error> {
        let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, machine)?;
        let kinds = expected(&map_of(&plan, inputs, outputs)?, case, dtype, group);
        run_plan(&plan, 0xff, inputs, outputs, |dispatch| {
            let makes = dispatch.pipeline.function.starts_with("mask_map");
            match map {
                Map::Given if makes => bytes(dispatch).copy_from_slice(&kinds),
                Map::Without if makes => {}
                Map::Without => {
                    run(library, &unmapped(dispatch), 4).unwrap_or_else(|why| panic!("{why}"))
                }
                _ => run(library, dispatch, 4).unwrap_or_else(|why| panic!("{why}")),
            }
            if makes && map == Map::Made {
                assert_eq!(bytes(dispatch), kinds, "{}", case.name);
                assert!(
                    [EMPTY, FULL, MIXED].iter().all(|kind| kinds.contains(kind)),
                    "{}",
                    case.name
                );
            }
            Ok(())
        })
    });
    output.unwrap_or_else(|error| panic!("{}: {error}", case.name))
}

#[test]
fn maps_say_what_masks_do_and_change_no_bit() {
    let Some(compiler) = compiler() else { return };
    let mut specs = Vec::new();
    for (i, dtype) in [DType::Bool, DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
        for broadcast in
            [[true, true, false, false], [false, false, false, false], [false, true, true, false]]
        {
            for (heads, batch_invariant) in [((2, 2), false), ((6, 2), true)] {
                let mask = Some(MaskSpec { dtype, hide: Hide::Infinite, broadcast });
                let spec = Spec::new(format!("map/{dtype}-{broadcast:?}-{heads:?}"));
                let spec =
                    spec.lengths(&[(150, 200), (97, 131)]).heads(heads.0, heads.1).dims(16, 16);
                let spec = Spec {
                    mask,
                    batch_invariant,
                    causal: i % 2 == 0,
                    ragged_queries: true,
                    ..spec
                };
                specs.push((Spec { keys: Keys::Ragged { slack: 0 }, ..spec }, dtype));
            }
        }
    }
    let source = source_of(&["PREFILL_TYPES(\"float\"", "COMBINE(float", "MASK_MAP("]);
    for_all((&compiler, &source, support::build()), &specs, |library, (spec, dtype)| {
        let mut case = spec.generate();
        tiled(&mut case, *dtype);
        for machine in [gpu(8, 1), gpu(9, 40)] {
            let group = spec.query_heads / spec.kv_heads;
            let mut of = |map| bits(&run_with(library, (&case, *dtype, group), &machine, map));
            let without = of(Map::Without);
            if support::build() == Build::Plain
                && (of(Map::Made) != without || of(Map::Given) != without)
            {
                return Err(format!("{} on {machine}: the map changes bits", spec.name));
            }
        }
        Ok(())
    });
}
