//! Ring prefill beside one GPU.

use crate::measure::{
    DIM, Error, HEADS, KV_HEADS, Operand, Ranks, Runs, SCALE, as_bytes, difference, from_bytes,
};
use regard::cuda::DeviceMemory;
use regard::{Attention, DType, Inputs, Outputs, Plan, Problem, Tensor, Variant, bf16};
use regard_nccl::{BalancedRows, Device, RingPrefill, RingStep};

/// Causal prefill of one sequence.
pub fn prefill(ranks: &Ranks, len: usize) -> Result<(), Error> {
    let (count, number) = (ranks.count(), ranks.number());
    let attention = Attention { scale: Some(SCALE / 2.0), ..Attention::causal() };
    let problem = Problem {
        query_heads: HEADS,
        kv_heads: KV_HEADS,
        query_len: len,
        kv_len: len,
        variant: Variant { causal: true, ..Variant::default() },
        ..Problem::new(DType::BF16, DIM)
    };
    let balanced = BalancedRows { len, ranks: count };
    let out_row = HEADS * DIM;
    let OneGpu { seconds: one, sampled: expected } = match number {
        0 => on_one_gpu(ranks, &problem, attention, &balanced)?,
        _ => OneGpu::default(),
    };
    ranks.gather(&[0])?;

    let rows = balanced.count(number);
    let own = |seed, heads: usize| {
        let chunks = balanced.chunks(number);
        let ranges = chunks.map(|chunk| (chunk.start * heads * DIM, chunk.len() * heads * DIM));
        Operand::random(ranks, seed, &ranges)
    };
    let (q, k, v) = (own(1, HEADS)?, own(2, KV_HEADS)?, own(3, KV_HEADS)?);
    let mut out = Operand::new(&ranks.stream, rows * out_row)?;
    let mut ring = RingPrefill::new(&ranks.rank, &problem)?;
    let kv = [1, rows, KV_HEADS, DIM];
    let many = ranks.time(Runs::of_prefill(len), false, || {
        let step = RingStep {
            q: q.tensor(&[1, rows, HEADS, DIM])?,
            k: k.tensor(&kv)?,
            v: v.tensor(&kv)?,
            attention,
            out: out.tensor_mut(&[1, rows, HEADS, DIM])?,
            lse: None,
        };
        // SAFETY: operands live until the work is done.
        unsafe { ring.run(&ranks.rank, step)? };
        Ok(())
    })?;
    let ranges: Vec<_> =
        sampled(&balanced, number).iter().map(|&i| (i * out_row, out_row)).collect();
    let results = ranks.gather(&as_bytes(&ranks.download(&out, &ranges)?))?;
    if number == 0 {
        let found = difference(&expected, &from_bytes(&results.concat()))?;
        let work = 2.0 * (HEADS * DIM) as f64 * (len as f64).powi(2);
        println!(
            "prefill, {len} tokens, causal, {HEADS}/{KV_HEADS}, D {DIM}, bf16: one GPU {:.2} ms \
             ({:.0} TFLOP/s), {count} GPUs {:.2} ms ({:.0} in all), {:.2}x; results differ by \
             {found:.1e}",
            one * 1e3,
            work / one / 1e12,
            many * 1e3,
            work / many / 1e12,
            one / many,
        );
    }
    Ok(())
}

/// The same prefill on one GPU.
#[derive(Default)]
struct OneGpu {
    /// The time of a run.
    seconds: f64,
    /// The sampled rows of all ranks.
    sampled: Vec<bf16>,
}

/// Sampled rows of a rank, by their number there.
fn sampled(balanced: &BalancedRows, rank: usize) -> Vec<usize> {
    let rows = balanced.count(rank);
    (0..64).map(|i| (i * rows / 63).min(rows - 1)).collect()
}

fn on_one_gpu(
    ranks: &Ranks,
    problem: &Problem,
    attention: Attention<Tensor<DeviceMemory>>,
    balanced: &BalancedRows,
) -> Result<OneGpu, Error> {
    let (len, out_row) = (problem.query_len, HEADS * DIM);
    let operand = |seed, heads: usize| Operand::random(ranks, seed, &[(0, len * heads * DIM)]);
    let (q, k, v) = (operand(1, HEADS)?, operand(2, KV_HEADS)?, operand(3, KV_HEADS)?);
    let mut out = Operand::new(&ranks.stream, len * out_row)?;
    let device = &ranks.rank.device;
    let plan = Plan::new(problem, device.machine())?;
    device.load(&plan)?;
    let mut workspace = device.workspace(plan.workspace_bytes())?;
    let kv = [1, len, KV_HEADS, DIM];
    let seconds = ranks.time(Runs::of_prefill(len), true, || {
        let q = q.tensor(&[1, len, HEADS, DIM])?;
        let inputs = Inputs::new(q, k.tensor(&kv)?, v.tensor(&kv)?, attention);
        let mut outputs = Outputs { out: out.tensor_mut(&[1, len, HEADS, DIM])?, lse: None };
        // SAFETY: operands live until the work is done.
        unsafe { device.run(&plan, &inputs, &mut outputs, &mut workspace)? };
        Ok(())
    })?;
    let mut rows = Vec::new();
    for rank in 0..ranks.count() {
        let positions: Vec<usize> = balanced.chunks(rank).into_iter().flatten().collect();
        rows.extend(sampled(balanced, rank).iter().map(|&i| (positions[i] * out_row, out_row)));
    }
    Ok(OneGpu { seconds, sampled: ranks.download(&out, &rows)? })
}
