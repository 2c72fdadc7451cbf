//! The law of ring prefill and of head-parallel attention: n ranks equal one.

mod support;

use regard::oracle::Judge;
use regard::{
    Attention, DType, Error, Inputs, KvStorage, Problem, Tensor, TensorMut, Variant, Window, bf16,
    f16,
};
use regard_nccl::{BalancedRows, HeadParallel, HeadStep, RingPrefill, RingStep, Transport};
use support::{HostRank, Number, Random, TIMEOUT, on_ranks};

const HEADS: usize = 12;
const KV_HEADS: usize = 12;
const DIM: usize = 16;
const VALUE_DIM: usize = 8;

/// A problem of the law.
#[derive(Debug, Clone, Copy)]
struct Law {
    batch: usize,
    len: usize,
    kv_heads: usize,
    causal: bool,
    window: Window,
    chunk: Option<usize>,
    alibi: bool,
    sinks: bool,
    softcap: Option<f32>,
}

impl Law {
    fn new(len: usize) -> Law {
        Law {
            batch: 1,
            len,
            kv_heads: 4,
            causal: true,
            window: Window::default(),
            chunk: None,
            alibi: false,
            sinks: false,
            softcap: None,
        }
    }
}

/// The operands of the whole: `[B, L, H, D]`.
struct Whole<T> {
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
}

impl<T: Number> Whole<T> {
    fn new(law: &Law) -> Whole<T> {
        let mut random = Random(law.len as u64);
        let rows = law.batch * law.len;
        Whole {
            q: random.numbers(rows * HEADS * DIM),
            k: random.numbers(rows * law.kv_heads * DIM),
            v: random.numbers(rows * law.kv_heads * VALUE_DIM),
            slopes: random.numbers::<f32>(HEADS).iter().map(|x| x * 0.1).collect(),
            sinks: random.numbers(HEADS),
        }
    }

    /// What heads `heads` of the whole need.
    fn attention(&self, law: &Law, heads: std::ops::Range<usize>) -> Attention<Tensor<'_>> {
        Attention {
            causal: law.causal,
            window: law.window,
            chunk: law.chunk,
            softcap: law.softcap,
            alibi_slopes: law.alibi.then(|| Tensor::from(&self.slopes[heads.clone()])),
            sinks: law.sinks.then(|| Tensor::from(&self.sinks[heads])),
            ..Attention::default()
        }
    }

    fn inputs(&self, law: &Law) -> Inputs<'_> {
        let shape = |heads, dim| [law.batch, law.len, heads, dim];
        Inputs::new(
            Tensor::new(&self.q, shape(HEADS, DIM)).unwrap(),
            Tensor::new(&self.k, shape(law.kv_heads, DIM)).unwrap(),
            Tensor::new(&self.v, shape(law.kv_heads, VALUE_DIM)).unwrap(),
            self.attention(law, 0..HEADS),
        )
    }
}

/// Copies the elements of these rows, of each batch entry: `[B, rows, row]`.
fn rows_of<T: Copy>(whole: &[T], law: &Law, positions: &[usize], row: usize) -> Vec<T> {
    let entries = (0..law.batch).flat_map(|b| positions.iter().map(move |&p| (b, p)));
    entries.flat_map(|(b, p)| whole[(b * law.len + p) * row..][..row].to_vec()).collect()
}

fn positions(rank: &HostRank, len: usize) -> Vec<usize> {
    let rows = BalancedRows { len, ranks: rank.transport.size() };
    rows.chunks(rank.transport.rank()).into_iter().flatten().collect()
}

/// The positions of a rank's rows, its outputs and log-sum-exps.
type Part<T> = (Vec<usize>, Vec<T>, Vec<f32>);

fn run_ring<T: Number>(law: &Law, whole: &Whole<T>, rank: &HostRank) -> Result<Part<T>, Error> {
    let problem = Problem::from_inputs(&whole.inputs(law), T::DTYPE, true)?;
    let mut ring = RingPrefill::new(rank, &problem)?;
    let own = positions(rank, law.len);
    let q = rows_of(&whole.q, law, &own, HEADS * DIM);
    let k = rows_of(&whole.k, law, &own, law.kv_heads * DIM);
    let v = rows_of(&whole.v, law, &own, law.kv_heads * VALUE_DIM);
    let mut out = vec![T::from_f32(f32::NAN); law.batch * own.len() * HEADS * VALUE_DIM];
    let mut lse = vec![f32::NAN; law.batch * own.len() * HEADS];
    let shape = |heads, dim| [law.batch, own.len(), heads, dim];
    // Twice: nothing of a call stays in the next.
    for _ in 0..2 {
        let step = RingStep {
            q: Tensor::new(&q, shape(HEADS, DIM))?,
            k: Tensor::new(&k, shape(law.kv_heads, DIM))?,
            v: Tensor::new(&v, shape(law.kv_heads, VALUE_DIM))?,
            attention: whole.attention(law, 0..HEADS),
            out: TensorMut::new(&mut out, shape(HEADS, VALUE_DIM))?,
            lse: Some(TensorMut::new(&mut lse, [law.batch, own.len(), HEADS])?),
        };
        // SAFETY: on the host, the work is done when the call returns.
        unsafe { ring.run(rank, step)? };
    }
    Ok((own, out, lse))
}

/// 1 to 4 ranks give what one device gives, within its tolerance.
fn ring_holds<T: Number>(law: &Law) {
    let whole = Whole::<T>::new(law);
    let judge = Judge::new(&whole.inputs(law), T::DTYPE).unwrap();
    let row = HEADS * VALUE_DIM;
    for count in 1..=4 {
        let mut out = vec![T::from_f32(f32::NAN); law.batch * law.len * row];
        let mut lse = vec![f32::NAN; law.batch * law.len * HEADS];
        let parts = on_ranks(count, TIMEOUT, |rank| run_ring(law, &whole, &rank).unwrap());
        for (own, part, part_lse) in parts {
            for b in 0..law.batch {
                for (i, p) in own.iter().enumerate() {
                    let (to, from) = (b * law.len + p, b * own.len() + i);
                    out[to * row..][..row].copy_from_slice(&part[from * row..][..row]);
                    lse[to * HEADS..][..HEADS].copy_from_slice(&part_lse[from * HEADS..][..HEADS]);
                }
            }
        }
        let out = Tensor::new(&out, [law.batch, law.len, HEADS, VALUE_DIM]).unwrap();
        let lse = Tensor::new(&lse, [law.batch, law.len, HEADS]).unwrap();
        let verdict = judge.check(&out, Some(&lse));
        assert!(verdict.is_ok(), "{count} ranks, {law:?}: {}", verdict.unwrap_err());
    }
}

fn ring_holds_everywhere(law: Law) {
    for len in [1, 2, 5, 16, 67] {
        ring_holds::<f32>(&Law { len, ..law });
        ring_holds::<f32>(&Law { len, batch: 3, ..law });
    }
    ring_holds::<bf16>(&Law { batch: 2, ..law });
    ring_holds::<f16>(&law);
}

#[test]
fn causal_rings() {
    ring_holds_everywhere(Law::new(97));
    ring_holds_everywhere(Law { sinks: true, softcap: Some(2.0), ..Law::new(64) });
}

#[test]
fn full_rings() {
    ring_holds_everywhere(Law { causal: false, sinks: true, ..Law::new(50) });
}

#[test]
fn rings_with_windows() {
    for left in [0, 3, 9, 40] {
        let window = Window { left: Some(left), right: None };
        ring_holds_everywhere(Law { window, sinks: left == 9, ..Law::new(80) });
    }
    let window = Window { left: Some(7), right: Some(12) };
    ring_holds_everywhere(Law { window, causal: false, ..Law::new(70) });
}

#[test]
fn rings_with_alibi() {
    ring_holds_everywhere(Law { alibi: true, ..Law::new(61) });
    ring_holds_everywhere(Law { alibi: true, causal: false, sinks: true, ..Law::new(33) });
}

#[test]
fn rings_with_chunked_attention() {
    for chunk in [1, 7, 16, 64, 1000] {
        ring_holds_everywhere(Law { chunk: Some(chunk), sinks: chunk == 16, ..Law::new(75) });
    }
    let window = Window { left: Some(9), right: Some(4) };
    ring_holds_everywhere(Law { chunk: Some(20), alibi: true, window, ..Law::new(75) });
    ring_holds_everywhere(Law { chunk: Some(20), window, causal: false, ..Law::new(75) });
}

/// A short window needs the keys of few ranks, so the ring stops early and has few parts.
#[test]
fn a_window_shortens_the_ring() {
    let law = Law { window: Window { left: Some(4), right: None }, ..Law::new(800) };
    let whole = Whole::<f32>::new(&law);
    let problem = Problem::from_inputs(&whole.inputs(&law), DType::F32, false).unwrap();
    let parts = on_ranks(4, TIMEOUT, |rank| RingPrefill::new(&rank, &problem).unwrap().parts());
    assert_eq!(parts, [2; 4]);
}

/// Chunks that no rows share with the keys of another rank leave nothing to pass around.
#[test]
fn short_chunks_shorten_the_ring() {
    let law = Law { chunk: Some(100), ..Law::new(800) };
    let whole = Whole::<f32>::new(&law);
    let problem = Problem::from_inputs(&whole.inputs(&law), DType::F32, false).unwrap();
    let parts = on_ranks(4, TIMEOUT, |rank| RingPrefill::new(&rank, &problem).unwrap().parts());
    assert_eq!(parts, [1; 4]);
}

fn run_heads<T: Number>(law: &Law, whole: &Whole<T>, rank: &HostRank) -> Result<Vec<T>, Error> {
    let problem = Problem::from_inputs(&whole.inputs(law), T::DTYPE, false)?;
    let mut heads = HeadParallel::new(rank, &problem)?;
    let (number, count) = (rank.transport.rank(), rank.transport.size());
    let rows = law.len / count;
    let own: Vec<usize> = (number * rows..(number + 1) * rows).collect();
    // Heads outermost.
    let cut = |whole: &[T], heads: usize, dim: usize| -> Vec<T> {
        let rows_first = rows_of(whole, law, &own, heads * dim);
        let order = (0..heads).flat_map(|head| (0..rows).map(move |i| (i * heads + head) * dim));
        order.flat_map(|at| rows_first[at..][..dim].to_vec()).collect()
    };
    let q = cut(&whole.q, HEADS, DIM);
    let (k, v) = (cut(&whole.k, law.kv_heads, DIM), cut(&whole.v, law.kv_heads, VALUE_DIM));
    let mut out = vec![T::from_f32(f32::NAN); HEADS * rows * VALUE_DIM];
    let own_heads = number * HEADS / count..(number + 1) * HEADS / count;
    for _ in 0..2 {
        let step = HeadStep {
            q: Tensor::new(&q, [HEADS, rows, DIM])?,
            k: Tensor::new(&k, [law.kv_heads, rows, DIM])?,
            v: Tensor::new(&v, [law.kv_heads, rows, VALUE_DIM])?,
            attention: whole.attention(law, own_heads.clone()),
            out: TensorMut::new(&mut out, [HEADS, rows, VALUE_DIM])?,
        };
        // SAFETY: on the host, the work is done when the call returns.
        unsafe { heads.run(rank, step)? };
    }
    Ok(out)
}

fn heads_hold<T: Number>(law: &Law) {
    let whole = Whole::<T>::new(law);
    let judge = Judge::new(&whole.inputs(law), T::DTYPE).unwrap();
    for count in 1..=4 {
        let rows = law.len / count;
        let parts = on_ranks(count, TIMEOUT, |rank| run_heads(law, &whole, &rank).unwrap());
        let mut out = vec![T::from_f32(f32::NAN); law.len * HEADS * VALUE_DIM];
        for (p, head) in (0..law.len).flat_map(|p| (0..HEADS).map(move |head| (p, head))) {
            let from = (head * rows + p % rows) * VALUE_DIM;
            out[(p * HEADS + head) * VALUE_DIM..][..VALUE_DIM]
                .copy_from_slice(&parts[p / rows][from..][..VALUE_DIM]);
        }
        let verdict =
            judge.check(&Tensor::new(&out, [1, law.len, HEADS, VALUE_DIM]).unwrap(), None);
        assert!(verdict.is_ok(), "{count} ranks, {law:?}: {}", verdict.unwrap_err());
    }
}

#[test]
fn head_parallel_attention() {
    let law = Law { kv_heads: KV_HEADS, ..Law::new(60) };
    let window = Window { left: Some(11), right: None };
    heads_hold::<f32>(&law);
    heads_hold::<bf16>(&Law { alibi: true, sinks: true, ..law });
    heads_hold::<f32>(&Law { window, alibi: true, ..law });
    heads_hold::<f32>(&Law { chunk: Some(16), softcap: Some(3.0), ..law });
    heads_hold::<f16>(&Law { causal: false, sinks: true, ..law });
}

/// A change of a problem.
type Change = fn(&mut Problem);

fn problem() -> Problem {
    Problem {
        query_heads: HEADS,
        kv_heads: KV_HEADS,
        query_len: 24,
        kv_len: 24,
        variant: Variant { causal: true, ..Variant::default() },
        ..Problem::new(DType::F32, DIM)
    }
}

fn ring_error(count: usize, change: impl Fn(usize, &mut Problem) + Sync) -> Vec<String> {
    on_ranks(count, TIMEOUT, |rank| {
        let mut problem = problem();
        change(rank.transport.rank(), &mut problem);
        RingPrefill::new(&rank, &problem).expect_err("an error").to_string()
    })
}

#[test]
fn ranks_with_different_prompts_are_told() {
    let found = ring_error(2, |rank, problem| {
        (problem.query_len, problem.kv_len) = (24 + rank, 24 + rank);
    });
    let expected = "`query_len` is 24 on rank 0 and 25 on rank 1; allowed: the same on every rank";
    assert_eq!(found, [expected; 2]);
}

#[test]
fn what_the_ring_does_not_pass_on_is_refused() {
    let refused: [(&str, Change); 5] = [
        ("query_len", |problem| problem.query_len = 20),
        ("keys", |problem| problem.keys = KvStorage::Paged { block_size: 16 }),
        ("key_dtype", |problem| problem.key_dtype = DType::BF16),
        ("mask", |problem| problem.variant.mask = Some(DType::Bool)),
        ("tree_mask", |problem| problem.variant = Variant { tree: true, ..Variant::default() }),
    ];
    for (argument, change) in refused {
        let found = ring_error(2, |_, problem| change(problem));
        assert!(found[1].starts_with(&format!("`{argument}` is ")), "{argument}: {found:?}");
        assert!(found[1].ends_with("in ring prefill"), "{argument}: {found:?}");
    }
}

/// A call of one rank with operands of `rows` rows.
fn ring_call(rows: usize, attention: Attention<Tensor>) -> String {
    let found = on_ranks(1, TIMEOUT, |rank| {
        let mut ring = RingPrefill::new(&rank, &problem()).unwrap();
        let data = vec![0f32; rows * HEADS * DIM];
        let mut out = data.clone();
        let shape = [1, rows, HEADS, DIM];
        let operand = Tensor::new(&data, shape).unwrap();
        let out = TensorMut::new(&mut out, shape).unwrap();
        let step = RingStep { q: operand, k: operand, v: operand, attention, out, lse: None };
        // SAFETY: on the host, the work is done when the call returns.
        unsafe { ring.run(&rank, step) }.map_or_else(|error| error.to_string(), |()| "done".into())
    });
    found.into_iter().next().unwrap()
}

#[test]
fn wrong_operands_of_a_ring_are_told() {
    assert_eq!(ring_call(24, Attention::causal()), "done");
    let found = ring_call(20, Attention::causal());
    assert_eq!(found, "`q` is of shape [1, 20, 12, 16]; allowed: [1, 24, 12, 16]");
    let lens = [24];
    let attention = Attention { kv_lens: Some(Tensor::from(&lens)), ..Attention::causal() };
    assert!(ring_call(24, attention).starts_with("`kv_lens` is given; allowed: not given"));
    assert!(ring_call(24, Attention::default()).starts_with("`attention` is "));
    let attention = Attention { q_offset: regard::QueryOffset::Same(3), ..Attention::causal() };
    assert!(ring_call(24, attention).starts_with("`q_offset` is given; allowed: 0"));
}

#[test]
fn a_rank_that_ends_is_an_error_in_the_ring() {
    let found = on_ranks(3, TIMEOUT, |rank| {
        let mut ring = RingPrefill::new(&rank, &problem()).unwrap();
        if rank.transport.rank() == 1 {
            return String::new();
        }
        let data = vec![0f32; 8 * HEADS * DIM];
        let mut out = data.clone();
        let operand = Tensor::new(&data, [1, 8, HEADS, DIM]).unwrap();
        let step = RingStep {
            q: operand,
            k: operand,
            v: operand,
            attention: Attention::causal(),
            out: TensorMut::new(&mut out, [1, 8, HEADS, DIM]).unwrap(),
            lse: None,
        };
        // SAFETY: on the host, the work is done when the call returns.
        unsafe { ring.run(&rank, step) }.expect_err("an error").to_string()
    });
    assert!(found[0].contains("has ended") && found[2].contains("has ended"), "{found:?}");
}

#[test]
fn heads_and_rows_divide_among_the_ranks() {
    let found = |problem: Problem, count: usize| {
        on_ranks(count, TIMEOUT, |rank| {
            HeadParallel::new(&rank, &problem).expect_err("an error").to_string()
        })
        .swap_remove(0)
    };
    let allowed = "allowed: a multiple of 5, the number of ranks";
    assert_eq!(found(problem(), 5), format!("`query_heads` is 12; {allowed}"));
    let few = Problem { kv_heads: 2, ..problem() };
    assert!(found(few, 4).starts_with("`kv_heads` is 2; allowed: a multiple of 4"));
    let odd = Problem { query_len: 26, kv_len: 26, ..problem() };
    assert!(found(odd, 4).starts_with("`query_len` is 26; allowed: a multiple of 4"));
    assert!(
        found(Problem { lse: true, ..problem() }, 2)
            .starts_with("`lse` is not what head-parallel attention takes")
    );
}
