//! Head-parallel prefill beside one GPU.

use crate::measure::{
    DIM, Error, HEADS, KV_HEADS, Operand, Ranks, Runs, SCALE, as_bytes, difference, from_bytes,
};
use regard::cuda::DeviceMemory;
use regard::{Attention, DType, Inputs, Outputs, Plan, Problem, Tensor, TensorMut, Variant};
use regard_nccl::{Device, HeadParallel, HeadStep};

fn attention<'a>() -> Attention<Tensor<'a, DeviceMemory>> {
    Attention { scale: Some(SCALE / 2.0), ..Attention::causal() }
}

/// Rows of an output that are compared, of each head.
fn sampled(rows: usize) -> impl Iterator<Item = usize> {
    (0..8).map(move |i| i * (rows - 1) / 7)
}

/// Causal prefill of one sequence, of which each rank has a contiguous part. Tensors have heads
/// outermost: `[H, L, D]`.
pub fn heads(ranks: &Ranks, len: usize) -> Result<(), Error> {
    let (count, number) = (ranks.count(), ranks.number());
    let problem = Problem {
        query_heads: HEADS,
        kv_heads: KV_HEADS,
        query_len: len,
        kv_len: len,
        variant: Variant { causal: true, ..Variant::default() },
        ..Problem::new(DType::BF16, DIM)
    };
    let whole = Operand::new(&ranks.stream, HEADS * len * DIM)?;
    let one = if number == 0 { whole_on_one(ranks, &problem, &whole)? } else { 0.0 };
    ranks.gather(&[0])?;

    let rows = len / count;
    let own = |seed, heads: usize| {
        let ranges: Vec<_> =
            (0..heads).map(|head| ((head * len + number * rows) * DIM, rows * DIM)).collect();
        Operand::random(ranks, seed, &ranges)
    };
    let (q, k, v) = (own(1, HEADS)?, own(2, KV_HEADS)?, own(3, KV_HEADS)?);
    let mut out = Operand::new(&ranks.stream, HEADS * rows * DIM)?;
    let mut parallel = HeadParallel::new(&ranks.rank, &problem)?;
    let many = ranks.time(Runs::of_prefill(len), false, || {
        let step = HeadStep {
            q: q.tensor(&[HEADS, rows, DIM])?,
            k: k.tensor(&[KV_HEADS, rows, DIM])?,
            v: v.tensor(&[KV_HEADS, rows, DIM])?,
            attention: attention(),
            out: out.tensor_mut(&[HEADS, rows, DIM])?,
        };
        // SAFETY: operands live until the work is done.
        unsafe { parallel.run(&ranks.rank, step)? };
        Ok(())
    })?;
    let of = |len: usize, first: usize| -> Vec<_> {
        let row = move |(head, i): (usize, usize)| ((head * len + first + i) * DIM, DIM);
        (0..HEADS).flat_map(|head| sampled(rows).map(move |i| (head, i))).map(row).collect()
    };
    let results = ranks.gather(&as_bytes(&ranks.download(&out, &of(rows, 0))?))?;
    if number == 0 {
        let mut expected = Vec::new();
        for rank in 0..count {
            expected.extend(ranks.download(&whole, &of(len, rank * rows))?);
        }
        let found = difference(&expected, &from_bytes(&results.concat()))?;
        println!(
            "head-parallel, {len} tokens, causal, {HEADS}/{KV_HEADS}, D {DIM}, bf16: one GPU {:.2} \
             ms, {count} GPUs {:.2} ms, {:.2}x; results differ by {found:.1e}",
            one * 1e3,
            many * 1e3,
            one / many,
        );
    }
    Ok(())
}

/// Seconds of the whole on one GPU.
fn whole_on_one(ranks: &Ranks, problem: &Problem, out: &Operand) -> Result<f64, Error> {
    let (device, len) = (&ranks.rank.device, problem.query_len);
    let operand = |seed, heads: usize| Operand::random(ranks, seed, &[(0, heads * len * DIM)]);
    let (q, k, v) = (operand(1, HEADS)?, operand(2, KV_HEADS)?, operand(3, KV_HEADS)?);
    let plan = Plan::new(problem, device.machine())?;
    device.load(&plan)?;
    let mut workspace = device.workspace(plan.workspace_bytes())?;
    ranks.time(Runs::of_prefill(problem.query_len), true, || {
        let inputs = Inputs::new(
            q.tensor(&[1, HEADS, len, DIM])?.bhsd(),
            k.tensor(&[1, KV_HEADS, len, DIM])?.bhsd(),
            v.tensor(&[1, KV_HEADS, len, DIM])?.bhsd(),
            attention(),
        );
        // SAFETY: operands live until the work is done.
        unsafe {
            let shape = [1, HEADS, len, DIM];
            let out = TensorMut::from_device_address(out.address, DType::BF16, &shape, None)?;
            let mut outputs = Outputs { out: out.bhsd(), lse: None };
            device.run(&plan, &inputs, &mut outputs, &mut workspace)?;
        }
        Ok(())
    })
}
