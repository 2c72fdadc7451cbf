//! A plan for upper bounds runs like a plan for the lengths. Keys are split when a run knows the
//! lengths, so the results have the same bits. The planned workspace is enough.

use regard::cpu::Level;
use regard::oracle::{Judge, Row};
use regard::{
    Attention, DType, Error, Inputs, Machine, Outputs, Plan, Problem, Tensor, TensorMut, Window,
};

const HEADS: [usize; 2] = [8, 2];
const DIM: usize = 32;

/// A call, with the numbers that are drawn for it.
#[derive(Debug)]
struct Call {
    query_len: usize,
    kv_lens: Vec<i32>,
    window: Window,
    batch_invariant: bool,
}

/// Numbers from a linear congruential generator.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.0 >> 33
    }

    fn below(&mut self, end: u64) -> usize {
        (self.next() % end) as usize
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| (self.next() % 2001) as f32 / 1000.0 - 1.0).collect()
    }

    fn call(&mut self) -> Call {
        let query_len = [1, 1, 1, 2, 8, 9, 30][self.below(7)];
        let sequences = 1 + self.below(5);
        // Few long sequences among short ones: the keys of long sequences are split, the keys of
        // short ones are not.
        let mut length = || {
            let longest = [64, 700, 3000, 5000][self.below(4)];
            self.below(longest) as i32
        };
        let kv_lens = (0..sequences).map(|_| length()).collect();
        let left = [None, None, Some(100), Some(1500)][self.below(4)];
        let window = Window { left, right: None };
        Call { query_len, kv_lens, window, batch_invariant: self.below(4) == 0 }
    }
}

/// Operands of a call.
struct Operands {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    capacity: usize,
}

impl Call {
    fn operands(&self, numbers: &mut Numbers) -> Operands {
        let (batch, [heads, kv_heads]) = (self.kv_lens.len(), HEADS);
        let capacity = self.kv_lens.iter().max().copied().unwrap_or(0) as usize + 7;
        Operands {
            queries: numbers.floats(batch * self.query_len * heads * DIM),
            keys: numbers.floats(batch * capacity * kv_heads * DIM),
            values: numbers.floats(batch * capacity * kv_heads * DIM),
            capacity,
        }
    }

    fn inputs<'a>(&'a self, operands: &'a Operands) -> Inputs<'a> {
        let (batch, [heads, kv_heads]) = (self.kv_lens.len(), HEADS);
        let cache = [batch, operands.capacity, kv_heads, DIM];
        let attention = Attention {
            kv_lens: Some(Tensor::new(&self.kv_lens, [batch]).unwrap()),
            window: self.window,
            batch_invariant: self.batch_invariant,
            ..Attention::causal()
        };
        Inputs::new(
            Tensor::new(&operands.queries, [batch, self.query_len, heads, DIM]).unwrap(),
            Tensor::new(&operands.keys, cache).unwrap(),
            Tensor::new(&operands.values, cache).unwrap(),
            attention,
        )
    }

    /// Runs twice over one workspace, under a plan for the problem that `bounds` makes of this one.
    fn run(
        &self,
        inputs: &Inputs,
        machine: &Machine,
        bounds: impl Fn(&mut Problem),
    ) -> Result<Vec<f32>, Error> {
        let shape = [self.kv_lens.len(), self.query_len, HEADS[0], DIM];
        let mut outputs = [(); 2].map(|()| vec![f32::NAN; shape.iter().product()]);
        let mut workspace = None;
        for out in &mut outputs {
            let mut outputs = Outputs { out: TensorMut::new(out, shape)?, lse: None };
            let mut problem = Problem::from_operands(inputs, &outputs)?;
            bounds(&mut problem);
            let plan = Plan::new(&problem, machine)?;
            let workspace = workspace.get_or_insert_with(|| vec![0xff; plan.workspace_bytes()]);
            plan.run(inputs, &mut outputs, workspace)?;
        }
        let [first, second] = outputs;
        assert!(same_bits(&first, &second), "two runs of {self:?} on {machine} differ");
        Ok(first)
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn larger_bounds_change_no_bit() {
    let levels: Vec<_> = Level::ALL.into_iter().filter(|level| level.is_available()).collect();
    let mut numbers = Numbers(22);
    for number in 0..40 {
        let call = numbers.call();
        let operands = call.operands(&mut numbers);
        let inputs = call.inputs(&operands);
        let rows: Vec<_> = (0..call.kv_lens.len())
            .map(|sequence| Row {
                sequence,
                query: numbers.below(call.query_len as u64),
                head: numbers.below(HEADS[0] as u64),
            })
            .collect();
        let judge = Judge::for_rows(&inputs, DType::F32, &rows).unwrap();
        let level = levels[number % levels.len()];
        for threads in [2, 16] {
            let machine = Machine::host().unwrap().with_level(level).with_threads(threads);
            let exact = call.run(&inputs, &machine, |_| {}).unwrap();
            for (batch, query_len, kv_len) in [(7, 0, 131_072), (3, 900, 20_000)] {
                let found = call.run(&inputs, &machine, |problem| {
                    problem.batch += batch;
                    problem.query_len += query_len;
                    problem.kv_len += kv_len;
                });
                let found = found.unwrap();
                assert!(same_bits(&exact, &found), "{number}: {call:?} on {machine}: other bits");
                let shape = [call.kv_lens.len(), call.query_len, HEADS[0], DIM];
                judge.check(&Tensor::new(&found, shape).unwrap(), None).unwrap();
            }
        }
    }
}

#[test]
fn room_for_partial_results_does_not_grow_with_the_lengths() {
    for threads in [2, 16, 64] {
        let machine = Machine::host().unwrap().with_threads(threads);
        let bytes = |query_len, kv_len| {
            let problem = Problem {
                batch: 8,
                query_heads: 32,
                kv_heads: 8,
                query_len,
                kv_len,
                ..Problem::new(DType::F32, 128)
            };
            Plan::new(&problem, &machine).unwrap().workspace_bytes()
        };
        assert_eq!(bytes(1, 1 << 17), bytes(1, 1 << 20), "keys");
        assert_eq!(bytes(2048, 1 << 17), bytes(4096, 1 << 20), "queries and keys");
    }
}
