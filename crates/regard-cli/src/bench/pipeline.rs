//! The model of prefill: its products and softmax with every operand in a core's caches.
//!
//! The kernel itself runs over one page of keys, as long as a tile, that a block table names again
//! and again. So nothing waits for memory, and the many tiles of a row block hide the time of
//! loading its queries and writing its outputs. A shape falls short of the model by the rest of a
//! run: memory, uneven items, causal tiles that are half empty, and shorter walks.

use super::ceiling::median;
use super::shapes::Target;
use crate::case::attend;
use regard::{
    Attention, DType, Device, Error, Inputs, KvStorage, Machine, Outputs, Plan, Problem, Values,
    bf16, f16,
};
use regard_cases::{Array, Data};
use std::time::Instant;

/// Up to this many query tokens per sequence, memory is the limit.
const MAX_DECODE_TOKENS: usize = 16;

/// Tiles that each row block goes through.
const TILES: usize = 16;

/// Items per thread: as many as keep the schedule from splitting keys.
const ITEMS_PER_THREAD: usize = 4;

/// Runs that count, after one that does not. A run takes some 30 ms.
const RUNS: usize = 3;

/// Operands of the model, and its plan.
pub struct Pipeline {
    plan: Plan,
    q: Array,
    k: Array,
    v: Array,
    table: Array,
    lens: Array,
    out: Array,
    workspace: Vec<u8>,
}

impl Pipeline {
    /// The model of a shape on a CPU, if it has one: prefill whose keys and values are of the type
    /// of the queries.
    ///
    /// # Errors
    /// If nothing runs it there.
    pub fn new(target: &Target, machine: &Machine) -> Result<Option<Pipeline>, Error> {
        let Device::Cpu(facts) = &machine.device else { return Ok(None) };
        let Problem { dtype, head_dim, value_dim, .. } = target.problem;
        let same = [target.problem.key_dtype, target.problem.value_dtype] == [dtype; 2];
        let separate = target.problem.values == Values::Separate;
        if target.problem.query_len <= MAX_DECODE_TOKENS
            || !same
            || !separate
            || target.problem.key_lists.is_some()
        {
            return Ok(None);
        }
        let single = Problem { value_dim, out_dtype: dtype, ..Problem::new(dtype, head_dim) };
        let any = Problem { query_len: 1 << 14, kv_len: 1 << 14, ..single.clone() };
        let choice = Plan::new(&any, machine)?.choice().clone();
        let (rows, keys) = (choice.block_rows, choice.tile_keys);
        let batch = ITEMS_PER_THREAD * facts.threads;
        let problem = Problem {
            batch,
            query_len: rows,
            kv_len: TILES * keys,
            keys: KvStorage::Paged { block_size: keys },
            ..single
        };
        let plan = Plan::new(&problem, machine)?;
        let workspace = vec![0; plan.workspace_bytes()];
        Ok(Some(Pipeline {
            plan,
            workspace,
            q: Array::new(numbers(dtype, batch * rows * head_dim), &[batch, rows, 1, head_dim])?,
            k: Array::new(numbers(dtype, keys * head_dim), &[1, keys, 1, head_dim])?,
            v: Array::new(numbers(dtype, keys * value_dim), &[1, keys, 1, value_dim])?,
            table: Array::new(vec![0i32; batch * TILES], &[batch, TILES])?,
            lens: Array::new(vec![(TILES * keys) as i32; batch], &[batch])?,
            out: Array::unwritten(dtype, &[batch, rows, 1, value_dim]),
        }))
    }

    /// GFLOP/s of all threads together.
    ///
    /// # Errors
    /// None for operands that [`Pipeline::new`] made.
    pub fn rate(&mut self) -> Result<f64, Error> {
        let attention = Attention {
            block_table: Some(self.table.view()?),
            kv_lens: Some(self.lens.view()?),
            ..Attention::default()
        };
        let inputs = Inputs::new(self.q.view()?, self.k.view()?, self.v.view()?, attention);
        let mut times = Vec::new();
        for _ in 0..=RUNS {
            let mut outputs = Outputs { out: self.out.view_mut()?, lse: None };
            let begin = Instant::now();
            attend(&self.plan, &inputs, &mut outputs, &mut self.workspace)?;
            times.push(begin.elapsed().as_secs_f64());
        }
        let Problem { head_dim, value_dim, kv_len, .. } = *self.plan.problem();
        let flops = 2 * self.plan.problem().rows() * kv_len * (head_dim + value_dim);
        Ok(flops as f64 / median(times.split_off(1)) / 1e9)
    }
}

/// Numbers between -1 and 1.
fn numbers(dtype: DType, length: usize) -> Data {
    let number = |i: usize| ((i.wrapping_mul(0x9e37_79b9) >> 8) % 4096) as f32 / 2048.0 - 1.0;
    let numbers = (0..length).map(number);
    match dtype {
        DType::F16 => numbers.map(f16::from_f32).collect::<Vec<_>>().into(),
        DType::BF16 => numbers.map(bf16::from_f32).collect::<Vec<_>>().into(),
        _ => numbers.collect::<Vec<f32>>().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::shapes::Wish;
    use super::*;
    use regard::oracle::{Judge, all_rows};

    fn targets(names: &[&str]) -> Vec<Target> {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let wish = Wish {
            named: &crate::bench::NAMED,
            names: &names,
            shapes: &[],
            variants: &[],
            dtypes: &[],
            layouts: &[],
            lengths: &[],
            warm: false,
        };
        wish.targets().unwrap()
    }

    #[test]
    fn prefill_has_a_model_that_computes_attention() {
        let machine = Machine::host().unwrap().with_threads(2);
        for target in targets(&["p512", "p1024d64"]) {
            let mut model = Pipeline::new(&target, &machine).unwrap().expect("a model");
            assert!(model.rate().unwrap() > 0.0);
            let attention = Attention {
                block_table: Some(model.table.view().unwrap()),
                kv_lens: Some(model.lens.view().unwrap()),
                ..Attention::default()
            };
            let [q, k, v] = [&model.q, &model.k, &model.v].map(|array| array.view().unwrap());
            let inputs = Inputs::new(q, k, v, attention);
            let rows: Vec<_> = all_rows(&inputs).unwrap().into_iter().step_by(997).collect();
            let judge = Judge::for_rows(&inputs, target.problem.dtype, &rows).unwrap();
            assert!(judge.check(&model.out.view().unwrap(), None).is_ok(), "{}", target.name);
        }
    }

    #[test]
    fn decode_has_none() {
        let machine = Machine::host().unwrap();
        for target in targets(&["d4k", "v8", "tiny", "mla16-d4k"]) {
            assert!(Pipeline::new(&target, &machine).unwrap().is_none(), "{}", target.name);
        }
    }
}
