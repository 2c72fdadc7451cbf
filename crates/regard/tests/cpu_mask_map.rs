//! The tile map of a mask on the CPU: the kind of each tile, and that attention with the map has
//! the bits of attention without.

use regard::cpu::{self, Cpu, Inline, Level, TileMap, Workspace};
use regard::{DType, Error, Inputs, Machine, Outputs, Plan, Problem};
use regard_cases::list::list;
use regard_cases::random::with_larger_bounds;
use regard_cases::rows::bits;
use regard_cases::{Array, Case, Hide, Keys, MaskSpec, Output, Spec};

/// Tile kinds as [`TileMap`] lists them.
const HIDDEN: u8 = 0;
const FULL: u8 = 1;
const MIXED: u8 = 2;

/// The origin of a run's tile map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Map {
    /// There is none.
    Plain,
    /// `map_mask` makes it.
    Made,
    /// The caller writes it.
    Given,
    /// The caller says nothing of any tile, in bytes that stand for no kind.
    Unknown,
}

/// The map by its definition.
fn expected(map: &TileMap, mask: &Array) -> Vec<u8> {
    let [batch, heads, rows, keys] = mask.shape()[..] else { panic!("four dimensions") };
    assert_eq!((map.batch, map.heads), (batch, heads));
    let (numbers, boolean) = (mask.numbers().expect("numbers"), mask.dtype() == DType::Bool);
    let kind = |matrix: usize, block: usize, tile: usize| {
        let (mut keeps, mut hides) = (false, false);
        for row in (block * map.block_rows..map.rows).take(map.block_rows) {
            for key in (tile * map.tile_keys..map.keys).take(map.tile_keys) {
                let number = numbers[(matrix * rows + row) * keys + key];
                let hidden = number == if boolean { 0.0 } else { f64::NEG_INFINITY };
                (keeps, hides) = (keeps | !hidden, hides | hidden);
            }
        }
        match (keeps, hides) {
            (false, _) => HIDDEN,
            (true, false) if boolean => FULL,
            _ => MIXED,
        }
    };
    let mut kinds = Vec::new();
    for matrix in 0..batch * heads {
        for block in 0..map.row_blocks {
            kinds.extend((0..map.key_tiles).map(|tile| kind(matrix, block, tile)));
        }
    }
    kinds
}

/// Runs a case, and counts the tiles of its map by kind. A map that is made is the expected one.
fn run(case: &Case, machine: &Machine, bounds: bool, map: Map) -> (Output, [usize; 3]) {
    let mut counts = [0; 3];
    let output = case.run(|inputs: &Inputs, outputs: &mut Outputs| -> Result<(), Error> {
        let problem = Problem::from_operands(inputs, outputs)?;
        let problem = if bounds { with_larger_bounds(problem) } else { problem };
        let plan = Plan::new(&problem, machine)?;
        let cpu = Cpu::new()?;
        let mut workspace = Workspace::new(vec![0xff; plan.workspace_bytes()]);
        let found = cpu::tile_map(&plan, inputs, outputs)?;
        let kinds = |map: &TileMap| expected(map, case.attention.mask.as_ref().expect("a mask"));
        let mut write = |map: &TileMap, kinds: &[u8]| {
            workspace.as_mut_slice()[map.at..map.at + map.bytes()].copy_from_slice(kinds);
        };
        match (map, &found) {
            (Map::Given, Some(map)) => write(map, &kinds(map)),
            (Map::Unknown, Some(map)) => write(map, &vec![0xab; map.bytes()]),
            (Map::Made, _) => cpu.map_mask(&plan, inputs, outputs, &mut workspace)?,
            _ => {}
        }
        if map == Map::Plain {
            return cpu.run(&plan, inputs, outputs, &mut workspace);
        }
        for _layer in 0..2 {
            cpu.run_mapped(&plan, inputs, outputs, &mut workspace)?;
        }
        // No run writes over it.
        if let (Map::Made, Some(map)) = (map, found) {
            let made = &workspace.as_mut_slice()[map.at..map.at + map.bytes()];
            let kinds = kinds(&map);
            assert_eq!(made, kinds, "{}", case.name);
            kinds.iter().for_each(|&kind| counts[usize::from(kind)] += 1);
        }
        Ok(())
    });
    (output.unwrap_or_else(|error| panic!("{}, {map:?}: {error}", case.name)), counts)
}

/// Masks over entire tiles: prefill and few rows, features that move the keys that rows see, every
/// type.
fn specs() -> Vec<Spec> {
    let mut specs: Vec<Spec> = list().filter(|spec| spec.name.starts_with("masks/")).collect();
    let shapes: [&[(usize, usize)]; 3] =
        [&[(400, 800), (390, 700)], &[(1, 1500), (7, 900)], &[(20, 1200), (900, 900)]];
    for (i, mask) in [DType::Bool, DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
        for broadcast in
            [[true, true, false, false], [false; 4], [false, true, true, false], [true; 4]]
        {
            for (j, lengths) in shapes.into_iter().enumerate() {
                let name = format!("map/{mask}-{broadcast:?}-{j}");
                let dtype = [DType::F32, DType::BF16, DType::F16][(i + j) % 3];
                let spec = Spec::new(name).lengths(lengths).heads(6, 2).dims(32, 16).dtype(dtype);
                let mask = Some(MaskSpec { dtype: mask, hide: Hide::Blocks, broadcast });
                specs.push(Spec {
                    mask,
                    causal: j != 1,
                    softcap: (i == 1).then_some(20.0),
                    ragged_queries: true,
                    keys: Keys::Ragged { slack: 0 },
                    ..spec
                });
            }
        }
    }
    specs
}

#[test]
fn maps_say_what_masks_do_and_change_no_bit() {
    let host = Machine::host().expect("this machine");
    let levels: Vec<Level> = Level::ALL.into_iter().filter(|level| level.is_available()).collect();
    let mut counts = [0; 3];
    for (i, spec) in specs().iter().enumerate() {
        let case = spec.generate();
        // Levels in turn: the map does not depend on them, and lookups are theirs all.
        let level = levels[i % levels.len()];
        for (machine, bounds) in
            [(host.clone(), false), (host.clone().with_level(level).with_threads(3), true)]
        {
            let (plain, _) = run(&case, &machine, bounds, Map::Plain);
            for map in [Map::Made, Map::Given, Map::Unknown] {
                let (mapped, tiles) = run(&case, &machine, bounds, map);
                let name = &case.name;
                assert!(bits(&plain) == bits(&mapped), "{name} on {machine}: other bits, {map:?}");
                counts.iter_mut().zip(tiles).for_each(|(count, tiles)| *count += tiles);
            }
        }
    }
    assert!(counts.iter().all(|&tiles| tiles > 0), "hidden, full, mixed: {counts:?}");
}

#[test]
fn what_has_no_map_runs_without() {
    let spec = Spec::new("map/none").lengths(&[(40, 90)]);
    let case = spec.generate();
    let output = case.run(|inputs, outputs| {
        let cpu = Cpu::new()?;
        let plan = cpu.plan(inputs, outputs)?;
        assert_eq!(cpu::tile_map(&plan, inputs, outputs)?, None);
        let mut workspace = Workspace::for_plan(&plan)?;
        cpu.map_mask(&plan, inputs, outputs, &mut workspace)?;
        cpu.run_mapped(&plan, inputs, outputs, &mut workspace)
    });
    let plain = case.run(|inputs, outputs| {
        let plan = Plan::for_operands(inputs, outputs)?;
        plan.run(inputs, outputs, &mut vec![0; plan.workspace_bytes()])
    });
    assert_eq!(bits(&output.expect("a run")), bits(&plain.expect("a run")));
}

#[test]
fn refusals_name_the_argument() {
    let mask = MaskSpec { dtype: DType::Bool, hide: Hide::Infinite, broadcast: [false; 4] };
    let spec = Spec { mask: Some(mask), ..Spec::new("map/refused").lengths(&[(40, 90)]) };
    let case = spec.generate();
    let unmasked = Spec { mask: None, ..spec }.generate();
    let refused = |result: Result<(), Error>, words: &str| {
        let error = result.expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    };
    let result = case.run(|inputs, outputs| {
        let plan = Plan::for_operands(inputs, outputs)?;
        let mut short = vec![7; plan.workspace_bytes() - 1];
        let result = cpu::map_mask(&plan, inputs, outputs, &mut short, &Inline);
        refused(result, "`workspace` is");
        refused(cpu::run_mapped(&plan, inputs, outputs, &mut short, &Inline), "`workspace` is");
        assert!(short.iter().all(|&byte| byte == 7), "a refused call wrote");
        let mut workspace = vec![7; plan.workspace_bytes()];
        let other = unmasked.run(|inputs, outputs| {
            let result = cpu::map_mask(&plan, inputs, outputs, &mut workspace, &Inline);
            refused(result, "`mask` is not given");
            refused(cpu::tile_map(&plan, inputs, outputs).map(|_| ()), "`mask` is not given");
            Ok(())
        });
        other.map(|_| ())
    });
    result.expect("operands within the contract");
    let h200: Machine = "h200".parse().expect("a machine");
    let result = case.run(|inputs, outputs| {
        let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, &h200)?;
        let mut workspace = vec![0; plan.workspace_bytes()];
        let result = cpu::map_mask(&plan, inputs, outputs, &mut workspace, &Inline);
        refused(result, "not for the CPU");
        Ok(())
    });
    result.expect("operands within the contract");
}
