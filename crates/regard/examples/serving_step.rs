//! A serving engine's steps on the CPU.
//!
//! Sequences with a shared prefix are in a paged cache. One plan runs a chunk of a prompt and
//! single tokens, with log-sum-exps. The same result comes from attending to the shared prefix
//! once, and merging.
//!
//! `cargo run --release -p regard --example serving_step`

use regard::cpu::{Cpu, Workspace};
use regard::paged::{CopyBlocks, PageAllocator, Step};
use regard::{Append, Attention, Error, Inputs, Merge, Outputs, Rotary, Tensor, TensorMut};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const BLOCKS: usize = 64;
const BLOCK_SIZE: usize = 16;
/// Tokens that all sequences share: whole pages.
const PREFIX: usize = 4 * BLOCK_SIZE;

/// The pools of one layer: `[BLOCKS, BLOCK_SIZE, KV_HEADS, DIM]`.
struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Cache {
    /// Does a step's copies, then appends the keys and values of its new tokens. Keys and queries
    /// are rotated to their positions.
    fn append(
        &mut self,
        cpu: &Cpu,
        step: &Step,
        angles: &[f32],
        q: &mut [f32],
    ) -> Result<(), Error> {
        const ROW: usize = KV_HEADS * DIM;
        let tokens = step.tokens();
        let (mut key, mut value) = (vec![0f32; tokens * ROW], vec![0f32; tokens * ROW]);
        fill(1 + tokens, &mut key);
        fill(2 + tokens, &mut value);
        let (rows, pool) = ([tokens, KV_HEADS, DIM], [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM]);
        let tables = step.tables();
        let mut pools =
            [TensorMut::new(&mut self.keys, pool)?, TensorMut::new(&mut self.values, pool)?];
        cpu.copy_blocks(&mut CopyBlocks { pools: &mut pools, copies: step.copies() })?;
        cpu.append(&mut Append {
            key: Tensor::new(&key, rows)?,
            value: Tensor::new(&value, rows)?,
            key_pool: TensorMut::new(&mut self.keys, pool)?,
            value_pool: TensorMut::new(&mut self.values, pool)?,
            k_scales: None,
            v_scales: None,
            block_table: Some(tables.block_table),
            kv_lens: tables.kv_lens,
            cu_seqlens: Some(tables.cu_seqlens_q),
            rotary: Some(Rotary {
                table: Tensor::new(angles, [angles.len() / DIM, DIM])?,
                interleaved: false,
                query: Some(TensorMut::new(q, [tokens, HEADS, DIM])?),
            }),
        })
    }

    fn inputs<'a>(
        &'a self,
        q: &'a [f32],
        attention: Attention<Tensor<'a>>,
    ) -> Result<Inputs<'a>, Error> {
        let pool = [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM];
        let q = Tensor::new(q, [q.len() / (HEADS * DIM), HEADS, DIM])?;
        let (k, v) = (Tensor::new(&self.keys, pool)?, Tensor::new(&self.values, pool)?);
        Ok(Inputs::new(q, k, v, attention))
    }
}

/// Stands for the model's projections.
fn fill(seed: usize, row: &mut [f32]) {
    for (i, x) in row.iter_mut().enumerate() {
        *x = ((seed * 7919 + i * 104_729) % 1009) as f32 / 504.5 - 1.0;
    }
}

/// Cosines and sines of every position: `[positions, DIM]`.
fn rotary_table(positions: usize) -> Vec<f32> {
    let row = |position: usize| {
        (0..DIM).map(move |i| {
            let pair = i % (DIM / 2);
            let angle = position as f64 * 10_000f64.powf(-2.0 * pair as f64 / DIM as f64);
            if i < DIM / 2 { angle.cos() as f32 } else { angle.sin() as f32 }
        })
    };
    (0..positions).flat_map(row).collect()
}

/// Outputs `[rows, HEADS, DIM]` and log-sum-exps `[rows, HEADS]`. An engine would keep plan,
/// workspace and outputs.
fn run(cpu: &Cpu, inputs: &Inputs) -> Result<(Vec<f32>, Vec<f32>), Error> {
    let rows = inputs.q.shape().iter().product::<usize>() / (HEADS * DIM);
    let (mut out, mut lse) = (vec![0f32; rows * HEADS * DIM], vec![0f32; rows * HEADS]);
    let mut outputs = Outputs {
        out: TensorMut::new(&mut out, [rows, HEADS, DIM])?,
        lse: Some(TensorMut::new(&mut lse, [rows, HEADS])?),
    };
    let plan = cpu.plan(inputs, &outputs)?;
    print!("{}", plan.explain());
    let mut workspace = Workspace::for_plan(&plan)?;
    cpu.run(&plan, inputs, &mut outputs, &mut workspace)?;
    Ok((out, lse))
}

fn main() -> Result<(), Error> {
    let cpu = Cpu::new()?;
    let angles = rotary_table(BLOCKS * BLOCK_SIZE);
    let mut pages = PageAllocator::new(BLOCKS, BLOCK_SIZE)?;
    let zeros = vec![0f32; BLOCKS * BLOCK_SIZE * KV_HEADS * DIM];
    let mut cache = Cache { keys: zeros.clone(), values: zeros };
    let mut step = Step::new();

    // The first request computes the prefix; three others share its pages.
    let first = pages.create();
    step.append(&mut pages, first, PREFIX)?;
    step.finish(&pages)?;
    let mut q = vec![0f32; step.tokens() * HEADS * DIM];
    cache.append(&cpu, &step, &angles, &mut q)?;
    let mut sequences = vec![first];
    for _ in 0..3 {
        sequences.push(pages.fork(first)?);
    }

    // One step: a chunk of 40 tokens, and one token each of the others.
    step.clear();
    for (&sequence, tokens) in sequences.iter().zip([40, 1, 1, 1]) {
        step.append(&mut pages, sequence, tokens)?;
    }
    step.finish(&pages)?;
    let mut q = vec![0f32; step.tokens() * HEADS * DIM];
    fill(3, &mut q);
    cache.append(&cpu, &step, &angles, &mut q)?;
    let (out, lse) = run(&cpu, &cache.inputs(&q, step.attention())?)?;

    // The same with the prefix attended to once: every row sees all of it, so it is one sequence
    // without causality.
    let table = &step.block_table()[..PREFIX / BLOCK_SIZE];
    let (rows, prefix_len) = ([0, step.tokens() as i32], [PREFIX as i32]);
    let prefix = Attention {
        cu_seqlens_q: Some(Tensor::from(&rows)),
        kv_lens: Some(Tensor::from(&prefix_len)),
        block_table: Some(Tensor::new(table, [1, table.len()])?),
        ..Attention::default()
    };
    let (mut parts, mut part_lse) = run(&cpu, &cache.inputs(&q, prefix)?)?;

    // The rest of each sequence is a causal problem over its later pages.
    let width = step.block_table().len() / sequences.len();
    let tables = step.block_table().chunks(width);
    let later: Vec<i32> = tables.flat_map(|row| &row[PREFIX / BLOCK_SIZE..]).copied().collect();
    let later_lens: Vec<i32> = step.kv_lens().iter().map(|len| len - PREFIX as i32).collect();
    let suffix = Attention {
        kv_lens: Some(Tensor::from(&later_lens)),
        block_table: Some(Tensor::new(&later, [sequences.len(), later.len() / sequences.len()])?),
        ..step.attention()
    };
    let (suffix_out, suffix_lse) = run(&cpu, &cache.inputs(&q, suffix)?)?;
    parts.extend(suffix_out);
    part_lse.extend(suffix_lse);
    let (mut merged, mut merged_lse) = (vec![0f32; out.len()], vec![0f32; lse.len()]);
    let tokens = step.tokens();
    cpu.merge(&mut Merge {
        parts: Tensor::new(&parts, [2, tokens, HEADS, DIM])?,
        part_lse: Tensor::new(&part_lse, [2, tokens, HEADS])?,
        out: TensorMut::new(&mut merged, [tokens, HEADS, DIM])?,
        lse: Some(TensorMut::new(&mut merged_lse, [tokens, HEADS])?),
    })?;

    let difference = |a: &[f32], b: &[f32]| {
        let errors = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        errors.fold(0.0, f32::max)
    };
    let (error, lse_error) = (difference(&out, &merged), difference(&lse, &merged_lse));
    println!("{} rows; merged and flat differ by {error:.1e} (lse {lse_error:.1e})", step.tokens());
    assert!(error < 1e-5 && lse_error < 1e-5, "the merge is exact up to rounding");

    for sequence in sequences {
        pages.free(sequence)?;
    }
    Ok(())
}

#[cfg(test)]
#[test]
fn a_step_runs() {
    main().expect("the step");
}
