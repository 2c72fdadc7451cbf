//! The semantics, executable: attention in f64, one row and one key at a time.
//!
//! Every kernel of every backend must agree with [`attention`]; read it beside `docs/semantics.md`.
//! It shares nothing with the kernels but the description of the problem, and it is slow. [`naive`]
//! is the same maths without any care for rounding, in the type of the inputs. Its distance from
//! [`attention`] bounds the distance of kernels ([`Judge`]).
//!
//! Both take the rows to compute, so that a benchmark can check a sample of a large problem;
//! [`all_rows`] names every row.

mod cache;
mod tolerance;

pub use tolerance::{Agreement, Judge, Mismatch};

use crate::dtype::DType;
use crate::error::Error;
use crate::problem::{Inputs, KeyList, Sequence};
use crate::tensor::Tensor;
use cache::{Cache, LANES, Slots, Stored};
use half::{bf16, f16};
use std::collections::BTreeMap;

/// One row of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// The sequence's place in the batch.
    pub sequence: usize,
    /// The query's place in its sequence.
    pub query: usize,
    /// The query head.
    pub head: usize,
}

/// Rows of attention, in f64.
#[derive(Debug, Clone, Default)]
pub struct Reference {
    /// The rows, in order.
    pub rows: Vec<Row>,
    /// `[rows, Dv]`. Over [`all_rows`], that is the layout of a contiguous `out`.
    pub out: Vec<f64>,
    /// `[rows]`. Over [`all_rows`], that is the layout of a contiguous `lse`.
    pub lse: Vec<f64>,
    /// `[rows]`: the effect of rounding on each row.
    pub rounding: Vec<Rounding>,
}

/// The change of a row's results when f32 rounds every score, every probability and every sum, to
/// first order.
///
/// With p_j the probability of key j and d_j the error of its score, the log-sum-exp moves by `sum
/// p_j d_j` and the output by `sum p_j d_j (v_j - out)`. A sink is a key whose value is zero. With
/// u one rounding (half of `f32::EPSILON`), `d_j = 4 u (m_j + 1) + sqrt(Dk) u |scale * dot_j| +
/// underflow`:
///
/// - m_j is the magnitude of the terms of the score, `|scale| sum_d |q_d k_d| + |bias|`. If terms
///   of both signs cancel, the sum rounds up as often as down, at the size of its partial sums. For
///   independent normal terms the standard deviation comes to 0.64 u at m_j, for every dim and
///   order. Scale, softcap, bias and the base of the exponential take one rounding each, mostly at
///   less. Four roundings are six standard deviations of the first and leave room for the rest.
/// - 1 stands for the probability: a relative error there acts as an absolute error of the score.
/// - If terms have one sign, partial sums grow with the number of terms, and equal terms are all
///   rounded the same way: nothing averages out. This part of the partial sums is the drift: after
///   i of n terms it is `i / n` of the result. If n terms are added in runs of sqrt(n), and then
///   the runs, the roundings come to at most `sqrt(n) / 2 u` of the result in the runs and as much
///   again between them, if all of them have the maximum size and one sign. So `sqrt(n) u |result|`
///   is the worst case. One chain of n terms may be off by `n / 2 u`: kernels are not allowed that.
/// - Underflow: numbers below the smallest normal number may count as 0, so each of the operands
///   and products may lose that much.
///
/// Both sums over the n keys of a row drift likewise, the sum of probabilities and the sum of
/// weighted values: the log-sum-exp moves by another `sqrt(n) u`, and the output by `2 sqrt(n)
/// u |out|`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rounding {
    /// `sum p_j d_j (max |v_j| + max |out|)`, maxima over the head dim: a bound of `sum p_j
    /// d_j |v_j - out|`; and the drift of the sums over keys. Over codes and blocks of values,
    /// under 16-bit queries, also the rounding of small probabilities that a kernel holds in f16.
    pub out: f64,
    /// `sum p_j d_j`, and the drift of the sum over keys.
    pub lse: f64,
    /// `sqrt(sum (m_j p_j max |v_j|)^2)`: how far the output moves, in standard deviations of one
    /// rounding, when every probability is rounded by itself. f16 and bf16 round probabilities
    /// before the second product, naive as well as kernels on matrix units. A list may name a key
    /// `m_j` times: its probabilities are equal, and so are their roundings, which do not average
    /// out.
    pub probabilities: f64,
    /// Whether the row keeps no key: its output is exactly 0.
    pub empty: bool,
}

/// Every row, in the order of a contiguous output: `[B, Lq, Hq]`, or `[total, Hq]` if sequences are
/// ragged.
///
/// # Errors
/// If the inputs break the contract.
pub fn all_rows(inputs: &Inputs) -> Result<Vec<Row>, Error> {
    let problem = inputs.problem(DType::F32, true)?;
    let mut rows = Vec::with_capacity(problem.rows());
    for sequence in 0..problem.batch {
        for query in 0..inputs.sequence(sequence).q_len {
            rows.extend((0..problem.query_heads).map(|head| Row { sequence, query, head }));
        }
    }
    Ok(rows)
}

/// Attention in f64, every row.
///
/// # Errors
/// If the inputs break the contract.
pub fn attention(inputs: &Inputs) -> Result<Reference, Error> {
    attention_rows(inputs, &all_rows(inputs)?)
}

/// Attention in f64, these rows.
///
/// # Errors
/// If the inputs break the contract.
///
/// # Panics
/// If there is no such row.
pub fn attention_rows(inputs: &Inputs, rows: &[Row]) -> Result<Reference, Error> {
    inputs.problem(DType::F32, true)?;
    Ok(exact_rows(inputs, rows, &mut Cache::new(inputs)))
}

fn exact_rows(inputs: &Inputs, rows: &[Row], cache: &mut Cache) -> Reference {
    let mut reference = Reference { rows: rows.to_vec(), ..Reference::default() };
    for &row in rows {
        let ExactRow { out, lse, rounding } = exact_row(&RowOperands::new(inputs, row), cache);
        reference.out.extend(out);
        reference.lse.push(lse);
        reference.rounding.push(rounding);
    }
    reference
}

/// The same maths, naively, in the type of the inputs; `out` and `lse` as f64, `rounding` left
/// empty.
///
/// f32: plain loops in f32. f16 and bf16, as an unfused composition of matrix products and a
/// softmax does it: sums of products are f32. Results that would pass through memory between the
/// steps (scores, probabilities, the output) are rounded to the type. Biases are added in f32. The
/// output is rounded to `out_dtype`.
///
/// # Errors
/// If the inputs break the contract.
///
/// # Panics
/// If there is no such row.
pub fn naive(inputs: &Inputs, out_dtype: DType, rows: &[Row]) -> Result<Reference, Error> {
    inputs.problem(out_dtype, true)?;
    Ok(naive_rows(inputs, out_dtype, rows, &mut Cache::new(inputs)))
}

fn naive_rows(inputs: &Inputs, out_dtype: DType, rows: &[Row], cache: &mut Cache) -> Reference {
    let mut reference = Reference { rows: rows.to_vec(), ..Reference::default() };
    for &row in rows {
        let (out, lse) = naive_row(&RowOperands::new(inputs, row), out_dtype, cache);
        reference.out.extend(out);
        reference.lse.push(lse);
    }
    reference
}

/// A row in f64.
struct ExactRow {
    out: Vec<f64>,
    lse: f64,
    rounding: Rounding,
}

/// `docs/semantics.md`, line by line.
fn exact_row(row: &RowOperands, cache: &mut Cache) -> ExactRow {
    let [keys, values] = cache.of(row.row.sequence, row.key_head);
    // Steps 1 to 4.
    let query = row.query();
    let query_sum = query.iter().map(|q| q.abs() + 2.0).sum();
    let score = |key| {
        // Step 4, first: a key that is not kept is not read.
        if !row.keeps(key) {
            return None;
        }
        keys.load(&[key], |key| row.read_key(key));
        exact_score(row, &query, query_sum, key, keys.at(key))
    };
    let kept: Vec<Kept> = row.candidates().into_iter().filter_map(score).collect();

    // 5. softmax over the kept keys and the sink.
    let sink = row.sink();
    let max = kept.iter().map(|kept| kept.score).fold(sink, maximum);
    let mut out = vec![0.0; row.value_dim()];
    if max == f64::NEG_INFINITY {
        let rounding = Rounding { empty: true, ..Rounding::default() };
        return ExactRow { out, lse: f64::NEG_INFINITY, rounding };
    }
    let weights: Vec<_> = kept.iter().map(|kept| (kept.score - max).exp()).collect();
    let sum = weights.iter().sum::<f64>() + (sink - max).exp();

    // 6. out and lse
    let mut largest_values = Vec::with_capacity(kept.len());
    for (&Kept { key, .. }, weight) in kept.iter().zip(weights) {
        let probability = weight / sum;
        values.load(&[key], |key| row.read_value(key));
        let Stored { numbers, scale, largest, .. } = values.at(key);
        for (o, v) in out.iter_mut().zip(numbers) {
            *o += probability * scale * v;
        }
        largest_values.push(LargestValue { value: largest * scale, code: *largest });
    }
    let lse = max + sum.ln();
    // The contract does not cover values that come, over all keys, to more than kernels can add up.
    let of_all_keys = largest_values.iter().map(|largest| largest.value.max(largest.code));
    if of_all_keys.fold(0.0, maximum) * kept.len() as f64 >= LARGEST_VALUES {
        out.fill(f64::NAN);
    }

    let rounding = rounding(row, &kept, &largest_values, lse, largest(&out));
    ExactRow { out, lse, rounding }
}

/// A key that a row keeps.
struct Kept {
    key: usize,
    score: f64,
    /// The error of the score: `d_j` of [`Rounding`].
    error: f64,
}

/// Steps 1 to 4 for one key that the masks keep; `None` if its bias is minus infinity.
/// `query_sum` is the sum of the query's magnitudes, each plus 2.
fn exact_score(
    row: &RowOperands,
    query: &[f64],
    query_sum: f64,
    key: usize,
    stored: &Stored,
) -> Option<Kept> {
    let attention = &row.inputs.attention;
    let scale = attention.scale.map_or(1.0 / (query.len() as f64).sqrt(), f64::from);
    let key_scale = stored.scale;
    // 1. score
    let (dot, terms) = dot_and_terms(query, &stored.numbers);
    let mut score = scale * key_scale * dot;
    let mut magnitude = (scale * key_scale).abs() * terms;
    // The contract does not cover a product or a score whose terms come to more than f32 holds.
    let largest = if row.has_additive_mask() { LARGEST_MASKED_TERMS } else { LARGEST_TERMS };
    if terms.max(magnitude) > largest {
        score = f64::NAN;
    }
    let lost = SMALLEST_NORMAL * (query_sum + stored.sum);
    let drift = (query.len() as f64).sqrt() * HALF_EPSILON * score.abs();
    // A kernel multiplies with the key's scale before or after the product.
    let sum_error = drift + scale.abs() * key_scale.abs().max(1.0) * lost;
    // 2. softcap
    if let Some(cap) = attention.softcap.map(f64::from) {
        score = cap * (score / cap).tanh();
    }
    // 3. bias
    let distance = (row.position() - row.key_position(key)).unsigned_abs() as f64;
    let bias = -row.slope() * distance + row.additive_mask(key);
    magnitude += bias.abs();
    // A bias of minus infinity hides its key; a finite one never does.
    if bias == f64::NEG_INFINITY {
        return None;
    }
    score += bias;
    if bias.is_finite() {
        score = score.clamp(-LARGEST, LARGEST);
    }
    Some(Kept { key, score, error: score_error(magnitude) + sum_error })
}

/// The change of a row's results by f32 roundings: see [`Rounding`]. `values` has an element per
/// kept key.
fn rounding(
    row: &RowOperands,
    kept: &[Kept],
    values: &[LargestValue],
    lse: f64,
    largest_out: f64,
) -> Rounding {
    let mut rounding = Rounding { empty: kept.is_empty(), ..Rounding::default() };
    rounding.lse = (kept.len() as f64).sqrt() * HALF_EPSILON;
    rounding.out = 2.0 * rounding.lse * largest_out + 2.0 * SMALLEST_NORMAL;
    let mut shares = Vec::with_capacity(kept.len());
    let subnormal_below = if row.has_probabilities_in_f16() {
        let top_score = kept.iter().map(|kept| kept.score).fold(f64::NEG_INFINITY, maximum);
        SHIFTED_NORMAL * (top_score - lse).exp()
    } else {
        0.0
    };
    for (&Kept { score, error, .. }, largest) in kept.iter().zip(values) {
        let probability = (score - lse).exp();
        let moved = probability * error + SMALLEST_NORMAL;
        if probability < subnormal_below {
            rounding.out += subnormal_below * SUBNORMAL_ROUNDING * largest.value;
        }
        shares.push(probability * largest.value);
        rounding.lse += moved;
        // A kernel may multiply the probability by the scale: that product may underflow.
        rounding.out += moved * (largest.value + largest_out) + SMALLEST_NORMAL * largest.code;
    }
    if let Some(list) = row.list() {
        shares = add_equal_entries(&list, kept, &shares);
    }
    rounding.probabilities = shares.into_iter().map(|share| share.powi(2)).sum::<f64>().sqrt();
    let sink = row.sink();
    if sink != f64::NEG_INFINITY {
        let moved = (sink - lse).exp() * score_error(sink.abs());
        rounding.lse += moved;
        rounding.out += moved * largest_out;
    }
    rounding
}

/// The shares of kept keys in [`Rounding::probabilities`], with one share for all entries of a list
/// that name the same stored key. At another position that key may have another score.
fn add_equal_entries(list: &KeyList, kept: &[Kept], shares: &[f64]) -> Vec<f64> {
    let stored_at = |key: usize| match list {
        KeyList::Pages(pages) => {
            let listed = pages.key(key).expect("a candidate is not skipped");
            [listed.block as usize, listed.slot as usize]
        }
        // The keys of other lists have numbers of their own.
        KeyList::Keys(_) | KeyList::TwoPools(_) => [0, key],
    };
    let mut sums: BTreeMap<([usize; 2], u64), f64> = BTreeMap::new();
    for (&Kept { key, score, .. }, share) in kept.iter().zip(shares) {
        *sums.entry((stored_at(key), score.to_bits())).or_default() += share;
    }
    sums.into_values().collect()
}

/// The sum of the products of two vectors, and of their magnitudes. Several partial sums, so that
/// the compiler can use vector instructions.
fn dot_and_terms(a: &[f64], b: &[f64]) -> (f64, f64) {
    let (mut dots, mut terms) = ([0.0; LANES], [0.0; LANES]);
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            let product = a[lane] * b[lane];
            dots[lane] += product;
            terms[lane] += product.abs();
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        dots[lane] += a * b;
        terms[lane] += (a * b).abs();
    }
    (dots.iter().sum(), terms.iter().sum())
}

/// The largest magnitude in one key's value, and the largest magnitude of the numbers that are
/// stored for it.
struct LargestValue {
    value: f64,
    code: f64,
}

/// The largest finite f32: scores end there.
const LARGEST: f64 = f32::MAX as f64;
/// The largest sum of the magnitudes of a dot product, and of a score before its bias: 2^127.
const LARGEST_TERMS: f64 = (1u128 << 127) as f64;
/// The same with an additive mask, which may hold any number: 2^100, an amount that rounds away
/// beside the largest number.
const LARGEST_MASKED_TERMS: f64 = (1u128 << 100) as f64;
/// The largest value times the number of keys has to stay below this: 2^128, less the factor by
/// which unnormalized probabilities may exceed 1.
const LARGEST_VALUES: f64 = (1u128 << 120) as f64;
const SMALLEST_NORMAL: f64 = f32::MIN_POSITIVE as f64;
/// In f16, times 2^15, probabilities below this part of the row's largest are subnormal.
const SHIFTED_NORMAL: f64 = 1.0 / (1u64 << 29) as f64;
/// Half the step of subnormal numbers of f16, relative to the smallest normal one.
const SUBNORMAL_ROUNDING: f64 = 1.0 / (1u64 << 11) as f64;
/// One rounding, relative.
const HALF_EPSILON: f64 = f32::EPSILON as f64 / 2.0;

/// Four roundings of a score of that magnitude and of its probability.
fn score_error(magnitude: f64) -> f64 {
    4.0 * HALF_EPSILON * (magnitude + 1.0)
}

/// The greater; NaN if either is.
fn maximum(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// The same steps in the type of the inputs.
fn naive_row(row: &RowOperands, out_dtype: DType, cache: &mut Cache) -> (Vec<f64>, f64) {
    let [keys, values] = cache.of(row.row.sequence, row.key_head);
    let attention = &row.inputs.attention;
    let dtype = row.inputs.q.dtype();
    let query = row.query();
    let scale = row.inputs.scale();

    let kept: Vec<_> = row.candidates().into_iter().filter(|&key| row.keeps(key)).collect();
    let mut scores: Vec<(usize, f32)> = Vec::with_capacity(kept.len());
    for (&key, dot) in kept.iter().zip(naive_dots(row, &query, &kept, keys)) {
        let mut score = round(scale * dot, dtype);
        if let Some(cap) = attention.softcap {
            score = round(cap * (score / cap).tanh(), dtype);
        }
        let distance = (row.position() - row.key_position(key)).unsigned_abs() as f32;
        score += -(row.slope() as f32) * distance;
        let mask = row.additive_mask(key) as f32;
        if mask == f32::NEG_INFINITY {
            continue;
        }
        score += mask;
        if mask.is_finite() {
            score = score.clamp(f32::MIN, f32::MAX);
        }
        scores.push((key, score));
    }
    let sink = row.sink() as f32;
    let max =
        scores.iter().map(|&(_, score)| f64::from(score)).fold(f64::from(sink), maximum) as f32;
    let mut out = vec![0.0f32; row.value_dim()];
    if max == f32::NEG_INFINITY {
        return (vec![0.0; out.len()], f64::NEG_INFINITY);
    }
    let sum = scores.iter().fold((sink - max).exp(), |sum, &(_, score)| sum + (score - max).exp());
    for &(key, score) in &scores {
        let probability = round((score - max).exp() / sum, dtype);
        values.load(&[key], |key| row.read_value(key));
        for (o, v) in out.iter_mut().zip(&values.at(key).rounded) {
            *o += probability * v;
        }
    }
    (out.into_iter().map(|x| f64::from(round(x, out_dtype))).collect(), f64::from(max + sum.ln()))
}

/// The products of the query with these keys. Each is one chain of additions; several chains side
/// by side do not wait for each other.
fn naive_dots(row: &RowOperands, query: &[f64], keys: &[usize], stored: &mut Slots) -> Vec<f32> {
    let query: Vec<_> = query.iter().map(|&q| q as f32).collect();
    let mut dots = Vec::with_capacity(keys.len());
    for keys in keys.chunks(LANES) {
        stored.load(keys, |key| row.read_key(key));
        // If there are fewer keys, the last key is repeated.
        let vector =
            |lane: usize| &stored.at(keys[lane.min(keys.len() - 1)]).rounded[..query.len()];
        let vectors: [_; LANES] = std::array::from_fn(vector);
        let mut sums = [0.0f32; LANES];
        for (i, q) in query.iter().enumerate() {
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum += q * vector[i];
            }
        }
        dots.extend_from_slice(&sums[..keys.len()]);
    }
    dots
}

/// The operands of one row, by their names in docs/semantics.md.
struct RowOperands<'a> {
    inputs: &'a Inputs<'a>,
    row: Row,
    sequence: Sequence,
    key_head: usize,
}

impl<'a> RowOperands<'a> {
    fn new(inputs: &'a Inputs<'a>, row: Row) -> Self {
        let heads = |tensor: &Tensor| tensor.shape()[tensor.rank() - 2];
        let sequence = inputs.sequence(row.sequence);
        assert!(row.query < sequence.q_len && row.head < heads(&inputs.q), "there is no {row:?}");
        let group = heads(&inputs.q) / heads(&inputs.k);
        RowOperands { inputs, row, sequence, key_head: row.head / group }
    }

    /// p: the query's position.
    fn position(&self) -> i64 {
        self.row.query as i64 + self.sequence.q_offset
    }

    /// r(j): a key's position. Keys of page lists are numbered by their entry.
    fn key_position(&self, key: usize) -> i64 {
        if let Some(KeyList::Pages(pages)) = self.list() {
            return pages.key(key).map_or(0, |listed| i64::from(listed.key));
        }
        self.sequence.key_offset + self.sequence.key_stride as i64 * key as i64
    }

    fn query(&self) -> Vec<f64> {
        let q = &self.inputs.q;
        let mut query = vec![0.0; self.key_dim()];
        match self.inputs.attention.cu_seqlens_q {
            Some(_) => {
                q.read_row(&[self.sequence.q_start + self.row.query, self.row.head], &mut query)
            }
            None => q.read_row(&[self.row.sequence, self.row.query, self.row.head], &mut query),
        }
        query
    }

    /// Dk.
    fn key_dim(&self) -> usize {
        *self.inputs.q.shape().last().expect("q has dimensions")
    }

    /// Dv.
    fn value_dim(&self) -> usize {
        let v = &self.inputs.v;
        v.shape().last().expect("v has dimensions") * v.dtype().values()
    }

    /// The keys of which step 4 keeps some: all keys in use, or the listed keys, in the order of
    /// the list.
    fn candidates(&self) -> Vec<usize> {
        let kv_len = self.sequence.kv_len;
        match self.list() {
            None => (0..kv_len).collect(),
            Some(KeyList::Pages(pages)) => {
                (0..pages.len).filter(|&entry| pages.key(entry).is_some()).collect()
            }
            Some(KeyList::TwoPools([first, second])) => {
                let slots = |list: &[i32], slots: usize| {
                    let slot = list.iter().filter_map(|&entry| usize::try_from(entry).ok());
                    slot.filter(|&slot| slot < slots).collect::<Vec<_>>()
                };
                let of_second = slots(second, self.inputs.second_slots());
                let of_second = of_second.into_iter().map(|slot| kv_len + slot);
                slots(first, kv_len).into_iter().chain(of_second).collect()
            }
            Some(KeyList::Keys(list)) => {
                let index = list.iter().filter_map(|&entry| usize::try_from(entry).ok());
                index.filter(|&key| key < kv_len && self.is_mapped(key)).collect()
            }
        }
    }

    /// The row's list, if it has one.
    fn list(&self) -> Option<KeyList<'a>> {
        self.inputs.key_list(&self.sequence, self.row.query, self.key_head)
    }

    /// Whether a listed key's page is in the pool.
    fn is_mapped(&self, key: usize) -> bool {
        let Some(table) = &self.inputs.attention.block_table else { return true };
        let block = table.at(&[self.row.sequence, key / self.inputs.k.shape()[1]]);
        (0.0..self.inputs.k.shape()[0] as f64).contains(&block)
    }

    /// The slot in the second cache of a key that is numbered after the keys of the first.
    fn second_slot(&self, key: usize) -> Option<usize> {
        self.inputs.attention.second_indices?;
        key.checked_sub(self.sequence.kv_len)
    }

    fn read_key(&self, key: usize) -> Stored {
        let attention = &self.inputs.attention;
        if let (Some(slot), Some(keys)) = (self.second_slot(key), &attention.second_k) {
            return self.read(keys, &attention.second_k_scales, slot, self.key_dim());
        }
        self.read_parts(key)
    }

    /// A key of the first cache: the dims of `k`, then the dims of `rotary_k`.
    fn read_parts(&self, key: usize) -> Stored {
        let (k, attention) = (&self.inputs.k, &self.inputs.attention);
        let mut numbers = vec![0.0; self.key_dim()];
        let dims = k.shape()[k.rank() - 1] * k.dtype().values();
        let (first, rest) = numbers.split_at_mut(dims);
        let scale = self.read_slot(k, &attention.k_scales, key, first);
        if let Some(rotary) = &attention.rotary_k {
            self.read_slot(rotary, &None, key, rest);
        }
        self.stored(numbers, (k.dtype(), scale))
    }

    fn read_value(&self, key: usize) -> Stored {
        if let (Some(slot), Some(values)) = (self.second_slot(key), self.inputs.second_values()) {
            let scales = self.inputs.second_value_scales();
            return self.read(&values, scales, slot, self.value_dim());
        }
        self.read(&self.inputs.v, self.inputs.value_scales(), key, self.value_dim())
    }

    fn read(&self, tensor: &Tensor, scales: &Option<Tensor>, key: usize, dim: usize) -> Stored {
        let mut numbers = vec![0.0; dim];
        let scale = self.read_slot(tensor, scales, key, &mut numbers);
        self.stored(numbers, (tensor.dtype(), scale))
    }

    fn stored(&self, numbers: Vec<f64>, (dtype, scale): (DType, f64)) -> Stored {
        let rounded = dequantized(&numbers, (dtype, scale), self.inputs.q.dtype());
        let sum = numbers.iter().map(|x| x.abs()).sum();
        let largest = largest(&numbers);
        Stored { numbers, scale, rounded, sum, largest }
    }

    fn read_slot(
        &self,
        stored: &Tensor,
        scales: &Option<Tensor>,
        key: usize,
        vector: &mut [f64],
    ) -> f64 {
        let attention = &self.inputs.attention;
        let paged = |table: &Tensor| {
            let block_size = stored.shape()[1];
            let block = table.at(&[self.row.sequence, key / block_size]) as usize;
            [block, key % block_size, self.key_head]
        };
        let mut place = match &attention.block_table {
            Some(table) => paged(table),
            None if attention.indices_are_slots => {
                [key / stored.shape()[1], key % stored.shape()[1], self.key_head]
            }
            None => match self.list() {
                Some(KeyList::Pages(pages)) => {
                    let listed = pages.key(key).expect("a candidate is not skipped");
                    [listed.block as usize, listed.slot as usize, self.key_head]
                }
                _ => [self.row.sequence, key, self.key_head],
            },
        };
        let mut place = &mut place[..];
        if attention.cu_seqlens_k.is_some() {
            place = &mut place[1..];
            place[0] += self.sequence.kv_start;
        }
        stored.read_row(place, vector);
        let Some(scales) = scales else { return 1.0 };
        for (index, &n) in place.iter_mut().zip(scales.shape()) {
            if n == 1 {
                *index = 0;
            }
        }
        scales.at(place)
    }

    /// Step 4, for a key below kv_len.
    fn keeps(&self, key: usize) -> bool {
        let attention = &self.inputs.attention;
        let (p, r) = (i128::from(self.position()), i128::from(self.key_position(key)));
        let causal = !attention.causal || attention.tree_mask.is_some() || r <= p;
        let left = attention.window.left.is_none_or(|left| p - left as i128 <= r);
        let right = attention.window.right.is_none_or(|right| r <= p + right as i128);
        let chunk = attention
            .chunk
            .is_none_or(|chunk| p.div_euclid(chunk as i128) == r.div_euclid(chunk as i128));
        causal && left && right && chunk && self.boolean_mask(key) && self.tree(key)
    }

    fn boolean_mask(&self, key: usize) -> bool {
        match &self.inputs.attention.mask {
            Some(mask) if mask.dtype() == DType::Bool => self.mask_at(mask, key) != 0.0,
            _ => true,
        }
    }

    /// Whether a kernel may hold this row's probabilities in f16, whatever 16-bit type the queries
    /// have: over codes and blocks.
    fn has_probabilities_in_f16(&self) -> bool {
        !self.inputs.v.dtype().is_float() && self.inputs.q.dtype() != DType::F32
    }

    fn has_additive_mask(&self) -> bool {
        self.inputs.attention.mask.as_ref().is_some_and(|mask| mask.dtype() != DType::Bool)
    }

    fn additive_mask(&self, key: usize) -> f64 {
        match &self.inputs.attention.mask {
            Some(mask) if self.has_additive_mask() => self.mask_at(mask, key),
            _ => 0.0,
        }
    }

    /// mask[b, h, i, j], a dimension of 1 standing for all.
    fn mask_at(&self, mask: &Tensor, key: usize) -> f64 {
        let mut index = [self.row.sequence, self.row.head, self.row.query, key];
        for (index, &n) in index.iter_mut().zip(mask.shape()) {
            if n == 1 {
                *index = 0;
            }
        }
        mask.at(&index)
    }

    /// Bit t of row i, where the sequence's last q_len keys are its new tokens t; earlier keys are
    /// the prefix.
    fn tree(&self, key: usize) -> bool {
        let Some(tree) = &self.inputs.attention.tree_mask else { return true };
        let token = key as i64 - (self.sequence.kv_len as i64 - self.sequence.q_len as i64);
        let Ok(token) = usize::try_from(token) else { return true };
        let word = tree.at(&[self.row.sequence, self.row.query, token / 32]) as i32;
        word as u32 >> (token % 32) & 1 == 1
    }

    fn slope(&self) -> f64 {
        self.inputs.attention.alibi_slopes.map_or(0.0, |slopes| slopes.at(&[self.row.head]))
    }

    /// The sink's logit; minus infinity adds nothing to the denominator.
    fn sink(&self) -> f64 {
        self.inputs.attention.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks.at(&[self.row.head]))
    }
}

fn round(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// Stored numbers and their scale, as numbers of type `dtype`.
fn dequantized(numbers: &[f64], (stored, scale): (DType, f64), dtype: DType) -> Vec<f32> {
    if stored == dtype && scale == 1.0 {
        return numbers.iter().map(|&x| x as f32).collect();
    }
    numbers.iter().map(|&x| round((x * scale) as f32, dtype)).collect()
}

/// The largest magnitude; NaN if any element is NaN.
fn largest(vector: &[f64]) -> f64 {
    let mut maxima = [0.0; LANES];
    for chunk in vector.chunks(LANES) {
        for (max, x) in maxima.iter_mut().zip(chunk) {
            *max = maximum(x.abs(), *max);
        }
    }
    maxima.into_iter().fold(0.0, |max, x| maximum(x, max))
}

#[cfg(test)]
mod tests;
