//! Sharded decode beside one GPU.

use crate::measure::{
    DIM, Error, HEADS, KV_HEADS, Operand, Ranks, Runs, SCALE, SIZE, as_bytes, difference,
    from_bytes,
};
use regard::cuda::DeviceMemory;
use regard::{Attention, DType, Inputs, Outputs, Plan, Problem, Tensor, TensorMut, bf16};
use regard_nccl::{DecodeStep, Device, Queries, ShardedDecode};

/// One token per sequence. Queries and outputs have heads outermost: `[Hq, B, 1, D]`.
struct Decode<'a> {
    ranks: &'a Ranks,
    keys: usize,
    batch: usize,
    /// Steps of a sample.
    runs: Runs,
    /// The queries of all heads.
    q: Operand,
}

fn attention<'a>() -> Attention<Tensor<'a, DeviceMemory>> {
    Attention { scale: Some(SCALE), ..Attention::default() }
}

/// Decode over `keys` keys, each rank with a contiguous part of them.
pub fn decode(ranks: &Ranks, keys: usize, batch: usize) -> Result<(), Error> {
    let (count, number) = (ranks.count(), ranks.number());
    let bytes = keys * batch * KV_HEADS * DIM * SIZE;
    let rows = HEADS * batch * DIM;
    let runs = Runs::Graph((100_000_000_000 / bytes).clamp(16, 200));
    let q = Operand::random(ranks, 1, &[(0, rows)])?;
    let decode = Decode { ranks, keys, batch, runs, q };
    let mut whole = Operand::new(&ranks.stream, rows)?;
    let one = if number == 0 { decode.whole(&mut whole)? } else { 0.0 };
    ranks.gather(&[0])?;
    let part = decode.part()?;
    let (many, results) = decode.sharded(Queries::Sharded)?;
    let (replicated, _) = decode.sharded(Queries::Replicated)?;
    if number == 0 {
        let expected = ranks.download(&whole, &[(0, rows)])?;
        let found = difference(&expected, &from_bytes(&results.concat()))?;
        println!(
            "decode, {keys} keys, B {batch}, {HEADS}/{KV_HEADS}, D {DIM}, bf16: one GPU {:.1} us, \
             {count} GPUs {:.1} us, {:.2}x; own part alone {:.1} us, gather, exchange and merge \
             {:.1} us; queries replicated {:.1} us, {:.2}x; results differ by {found:.1e}",
            one * 1e6,
            many * 1e6,
            one / many,
            part * 1e6,
            (many - part) * 1e6,
            replicated * 1e6,
            one / replicated,
        );
    }
    Ok(())
}

impl Decode<'_> {
    fn problem(&self, keys: usize) -> Problem {
        Problem {
            batch: self.batch,
            query_heads: HEADS,
            kv_heads: KV_HEADS,
            kv_len: keys,
            ..Problem::new(DType::BF16, DIM)
        }
    }

    /// A tensor `[B, 1, Hq, D]` with heads outermost in memory.
    fn strides(&self) -> [i64; 4] {
        [DIM as i64, DIM as i64, (self.batch * DIM) as i64, 1]
    }

    fn queries(&self) -> Result<Tensor<'_, DeviceMemory>, Error> {
        let shape = [self.batch, 1, HEADS, DIM];
        let strides = self.strides();
        // SAFETY: the operand has these elements.
        Ok(unsafe {
            Tensor::from_device_address(self.q.address, DType::BF16, &shape, Some(&strides))?
        })
    }

    /// Seconds of all keys on one GPU.
    fn whole(&self, out: &mut Operand) -> Result<f64, Error> {
        self.alone(self.keys, out.address, None)
    }

    /// Seconds of a rank's part with partial outputs, on all ranks at once.
    fn part(&self) -> Result<f64, Error> {
        let device = &self.ranks.rank.device;
        let rows = HEADS * self.batch;
        let mut scratch = device.allocate(rows * (DIM + 1) * 4)?;
        let out = device.address(&mut scratch);
        self.alone(self.keys / self.ranks.count(), out, Some(out + (rows * DIM * 4) as u64))
    }

    /// Seconds of attention alone, to `out`; partial outputs have a log-sum-exp.
    fn alone(&self, keys: usize, out: u64, lse: Option<u64>) -> Result<f64, Error> {
        let Decode { ranks, batch, .. } = *self;
        let kv = [batch, keys, KV_HEADS, DIM];
        let all = [(0, kv.iter().product())];
        let (k, v) = (Operand::random(ranks, 2, &all)?, Operand::random(ranks, 3, &all)?);
        let device = &ranks.rank.device;
        let dtype = if lse.is_some() { DType::F32 } else { DType::BF16 };
        let planned = Problem { out_dtype: dtype, lse: lse.is_some(), ..self.problem(keys) };
        let plan = Plan::new(&planned, device.machine())?;
        device.load(&plan)?;
        let mut workspace = device.workspace(plan.workspace_bytes())?;
        let (shape, strides) = ([batch, 1, HEADS, DIM], self.strides());
        let inputs = Inputs::new(self.queries()?, k.tensor(&kv)?, v.tensor(&kv)?, attention());
        ranks.time(self.runs, lse.is_none(), || {
            // SAFETY: there is room for the outputs, which are read when the work is done.
            unsafe {
                let lse = lse
                    .map(|lse| TensorMut::from_device_address(lse, DType::F32, &shape[..3], None));
                let out = TensorMut::from_device_address(out, dtype, &shape, Some(&strides))?;
                let mut outputs = Outputs { out, lse: lse.transpose()? };
                device.run(&plan, &inputs, &mut outputs, &mut workspace)?;
            }
            Ok(())
        })
    }

    /// Seconds of sharded steps, and the results of all ranks.
    fn sharded(&self, queries: Queries) -> Result<(f64, Vec<Vec<u8>>), Error> {
        let Decode { ranks, keys, batch, .. } = *self;
        let (count, number) = (ranks.count(), ranks.number());
        let (shard, row, heads) = (keys / count, KV_HEADS * DIM, HEADS / count);
        let own: Vec<_> =
            (0..batch).map(|b| ((b * keys + number * shard) * row, shard * row)).collect();
        let (k, v) = (Operand::random(ranks, 2, &own)?, Operand::random(ranks, 3, &own)?);
        let rows = heads * batch * DIM;
        let q = Operand::random(ranks, 1, &[(number * rows, rows)])?;
        let mut out = Operand::new(&ranks.stream, rows)?;
        let mut sharded = ShardedDecode::new(&ranks.rank, &self.problem(shard), queries)?;
        let seconds = ranks.time(self.runs, false, || {
            let step = DecodeStep {
                q: match queries {
                    Queries::Sharded => q.tensor(&[heads, batch, 1, DIM])?,
                    _ => self.queries()?,
                },
                k: k.tensor(&[batch, shard, KV_HEADS, DIM])?,
                v: v.tensor(&[batch, shard, KV_HEADS, DIM])?,
                attention: attention(),
                out: out.tensor_mut(&[heads, batch, 1, DIM])?,
                lse: None,
            };
            // SAFETY: operands live until the work is done.
            unsafe { sharded.run(&ranks.rank, step)? };
            Ok(())
        })?;
        let results: Vec<bf16> = ranks.download(&out, &[(0, rows)])?;
        Ok((seconds, ranks.gather(&as_bytes(&results))?))
    }
}
