//! Every argument's misuse: the message names the argument, its value and the allowed values, and
//! nothing is written.

mod dense_problem;
mod expect;

use dense_problem::dense_problem;
use expect::expect;
use regard::cpu;
use regard::format::BlockQ8_0;
use regard::{
    Attention, DType, Error, Inputs, KeyOffset, KeyPositions, KvStorage, MAX_KEY_STRIDE, Machine,
    Outputs, Plan, Problem, QueryOffset, QueryStorage, Tensor, TensorMut, Variant, Window,
    attention, bf16, f16,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts this thread's allocations, and has no more than a tebibyte: systems and sanitizers differ
/// in their texts to more.
struct Counting;

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        if layout.size() > 1 << 40 {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static F32: [f32; 4096] = [0.5; 4096];
static F16: [f16; 4096] = [f16::ONE; 4096];
static BF16: [bf16; 4096] = [bf16::ONE; 4096];
static I32: [i32; 4096] = [-1; 4096];
static BOOL: [bool; 4096] = [true; 4096];

const SENTINEL: f32 = 42.0;

fn tensor<const N: usize>(dtype: DType, shape: [usize; N]) -> Tensor<'static> {
    let len = shape.iter().product::<usize>();
    match dtype {
        DType::F32 => Tensor::new(&F32[..len], shape),
        DType::F16 => Tensor::new(&F16[..len], shape),
        DType::BF16 => Tensor::new(&BF16[..len], shape),
        DType::I32 => Tensor::new(&I32[..len], shape),
        DType::Bool => Tensor::new(&BOOL[..len], shape),
        other => unreachable!("no test here asks for elements of type {other}"),
    }
    .expect("a contiguous view")
}

fn floats<const N: usize>(shape: [usize; N]) -> Tensor<'static> {
    tensor(DType::F32, shape)
}

fn ints<const N: usize>(values: &'static [i32], shape: [usize; N]) -> Tensor<'static> {
    Tensor::new(values, shape).expect("a contiguous view")
}

/// A view that repeats one row of `F32` as often as `shape` has it.
fn claiming<const N: usize>(shape: [usize; N]) -> Tensor<'static> {
    let mut strides = [0; N];
    strides[N - 1] = 1;
    Tensor::with_strides(&F32, shape, strides).expect("one row of the slice")
}

/// 2 sequences of 3 new tokens and 5 keys, 4/2 heads, head dims 8 and 4.
fn dense() -> Inputs<'static> {
    Inputs::new(
        floats([2, 3, 4, 8]),
        floats([2, 5, 2, 8]),
        floats([2, 5, 2, 4]),
        Attention::default(),
    )
}

/// The same heads; 2 and 1 new tokens, 4 and 2 keys.
fn ragged() -> Inputs<'static> {
    let attention = Attention {
        cu_seqlens_q: Some(ints(&[0, 2, 3], [3])),
        cu_seqlens_k: Some(ints(&[0, 4, 6], [3])),
        ..Attention::default()
    };
    Inputs::new(floats([3, 4, 8]), floats([6, 2, 8]), floats([6, 2, 4]), attention)
}

/// The dense queries; 5 and 7 keys in a pool of 6 blocks of 4 slots.
fn paged() -> Inputs<'static> {
    let attention = Attention {
        block_table: Some(ints(&[3, 0, -1, 5, 1, -1], [2, 3])),
        kv_lens: Some(ints(&[5, 7], [2])),
        ..Attention::causal()
    };
    Inputs::new(floats([2, 3, 4, 8]), floats([6, 4, 2, 8]), floats([6, 4, 2, 4]), attention)
}

fn host_plan(problem: &Problem) -> Plan {
    Plan::new(problem, &Machine::host().expect("this machine")).expect("a sound problem")
}

/// A contiguous `f32` view of the start of `data`, or of one element if the shape claims no
/// elements, or more than there are.
fn view<'a>(data: &'a mut [f32], shape: &[usize]) -> TensorMut<'a> {
    let len = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
    let shape = if len.is_some_and(|len| (1..=data.len()).contains(&len)) { shape } else { &[1] };
    // SAFETY: the shape fits the slice.
    unsafe { TensorMut::from_raw(data.as_mut_ptr().cast(), DType::F32, shape, None) }
        .expect("contiguous")
}

/// Checks that these inputs are refused, whichever way they come in, and that neither output is
/// touched.
#[track_caller]
fn refused(inputs: Inputs, argument: &str, found: &str, allowed: &str) {
    let plan = host_plan(&dense_problem());
    let mut workspace = vec![0; plan.workspace_bytes()];
    let (mut out, mut lse) = (vec![SENTINEL; 4096], vec![SENTINEL; 4096]);
    let mut shape = inputs.q.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = inputs.v.shape().last().copied().unwrap_or(1);
    }
    for with_lse in [false, true] {
        let lse = with_lse.then(|| view(&mut lse, &shape[..shape.len().saturating_sub(1)]));
        let mut outputs = Outputs { out: view(&mut out, &shape), lse };
        expect(Problem::from_operands(&inputs, &outputs).unwrap_err(), argument, found, allowed);
        expect(Plan::for_operands(&inputs, &outputs).unwrap_err(), argument, found, allowed);
        expect(
            plan.run(&inputs, &mut outputs, &mut workspace).unwrap_err(),
            argument,
            found,
            allowed,
        );
    }
    let error = attention::<f32>(inputs.q, inputs.k, inputs.v, &inputs.attention).unwrap_err();
    expect(error, argument, found, allowed);
    assert!(out.iter().chain(&lse).all(|&x| x == SENTINEL), "{argument}: something was written");
}

/// Runs inputs that must be accepted.
#[track_caller]
fn accepted(inputs: &Inputs) {
    attention::<f32>(inputs.q, inputs.k, inputs.v, &inputs.attention).expect("well-formed");
}

fn with_q(q: Tensor<'static>) -> Inputs<'static> {
    Inputs { q, ..dense() }
}

fn with_k(k: Tensor<'static>) -> Inputs<'static> {
    Inputs { k, ..dense() }
}

fn with_v(v: Tensor<'static>) -> Inputs<'static> {
    Inputs { v, ..dense() }
}

/// Well-formed inputs with something else about their attention.
fn but(
    mut inputs: Inputs<'static>,
    change: impl FnOnce(&mut Attention<Tensor<'static>>),
) -> Inputs<'static> {
    change(&mut inputs.attention);
    inputs
}

#[test]
fn shapes_that_disagree() {
    refused(with_q(floats([3, 3, 4, 8])), "k", "[2]", "[3] (one entry per sequence");
    refused(with_k(floats([2, 5, 2, 6])), "k", "head dim 6", "8, as q has");
    refused(with_k(floats([2, 4, 2, 8])), "v", "[2, 5, 2]", "[2, 4, 2] (as k has");
    refused(with_k(floats([2, 5, 1, 8])), "v", "[2, 5, 2]", "[2, 5, 1] (as k has");
    refused(with_v(floats([1, 5, 2, 4])), "v", "[1, 5, 2]", "[2, 5, 2]");
    refused(with_v(floats([2, 5, 4])), "v", "[2, 5, 4]", "4 dimensions");
    refused(with_q(floats([6, 4, 8])), "q", "[6, 4, 8]", "4 dimensions: [B, Lq, Hq, D]");
    refused(with_q(floats([1, 2, 3, 4, 8])), "q", "[1, 2, 3, 4, 8]", "4 dimensions");
    refused(with_q(floats([8])), "q", "[8]", "4 dimensions");
    refused(with_q(floats([])), "q", "[]", "a head dim of 1..=576");
    refused(with_k(floats([10, 2, 8])), "k", "[10, 2, 8]", "4 dimensions: [B, Lk, Hkv, D]");
    refused(
        Inputs { q: floats([1, 3, 4, 8]), ..ragged() },
        "q",
        "[1, 3, 4, 8]",
        "3 dimensions: [total, Hq, D]",
    );
    refused(
        Inputs { k: floats([1, 6, 2, 8]), ..ragged() },
        "k",
        "[1, 6, 2, 8]",
        "3 dimensions: [total, Hkv, D]",
    );
    refused(
        Inputs { k: floats([24, 2, 8]), ..paged() },
        "k",
        "[24, 2, 8]",
        "4 dimensions: [blocks, block_size",
    );
    refused(Inputs { k: floats([6, 0, 2, 8]), ..paged() }, "block_size", "0", "1..=2147483647");
}

#[test]
fn heads_and_head_dims() {
    refused(with_q(floats([2, 3, 0, 8])), "query_heads", "0", "1..=");
    let no_heads = Inputs { k: floats([2, 5, 0, 8]), v: floats([2, 5, 0, 4]), ..dense() };
    refused(no_heads, "kv_heads", "0", "1..=");
    refused(with_q(floats([2, 3, 3, 8])), "query_heads", "3 with 2", "a multiple of");
    refused(with_q(floats([2, 3, 4, 0])), "q", "[2, 3, 4, 0]", "head dim of 1..=576");
    refused(with_k(floats([2, 5, 2, 0])), "k", "[2, 5, 2, 0]", "head dim of 1..=576");
    refused(with_v(floats([2, 5, 2, 0])), "v", "[2, 5, 2, 0]", "head dim of 1..=576");
    let wide = Inputs {
        q: floats([1, 1, 2, 577]),
        k: floats([1, 1, 2, 577]),
        v: floats([1, 1, 2, 4]),
        ..dense()
    };
    refused(wide, "head_dim", "577", "1..=576");
    let wide = Inputs {
        q: floats([1, 1, 2, 8]),
        k: floats([1, 1, 2, 8]),
        v: floats([1, 1, 2, 577]),
        ..dense()
    };
    refused(wide, "value_dim", "577", "1..=576");
}

fn strided<const N: usize>(shape: [usize; N], strides: [i64; N]) -> Tensor<'static> {
    Tensor::with_strides(&F32, shape, strides).expect("inside the slice")
}

#[test]
fn innermost_strides() {
    for (name, inputs) in [
        ("q", with_q(strided([2, 3, 4, 8], [192, 64, 16, 2]))),
        ("k", with_k(strided([2, 5, 2, 8], [0, 16, 8, 0]))),
        ("v", with_v(strided([2, 5, 2, 4], [80, 16, 8, 2]))),
    ] {
        refused(inputs, name, "strides [", "an innermost stride of 1");
    }
    let lens = Tensor::with_strides(&I32, [2], [0]).expect("inside the slice");
    refused(
        but(dense(), |a| a.kv_lens = Some(lens)),
        "kv_lens",
        "strides [0]",
        "an innermost stride of 1",
    );
    let mask = strided([1, 1, 3, 5], [0, 0, 10, 2]);
    refused(
        but(dense(), |a| a.mask = Some(mask)),
        "mask",
        "strides [0, 0, 10, 2]",
        "an innermost stride of 1",
    );
    let sinks = strided([4], [2]);
    refused(
        but(dense(), |a| a.sinks = Some(sinks)),
        "sinks",
        "strides [2]",
        "an innermost stride of 1",
    );
    let table = Tensor::with_strides(&I32, [2, 3], [6, 2]).expect("inside the slice");
    let inputs = but(paged(), |a| a.block_table = Some(table));
    refused(inputs, "block_table", "strides [6, 2]", "an innermost stride of 1");
}

#[test]
fn scales_of_codes() {
    static CODES: [i8; 160] = [1; 160];
    static BLOCKS: [BlockQ8_0; 20] = [BlockQ8_0 { scale: f16::ONE, codes: [1; 32] }; 20];
    let codes = with_k(Tensor::new(&CODES, [2, 5, 2, 8]).unwrap());
    let scaled = |scales| but(codes, |a| a.k_scales = Some(scales));
    refused(codes, "k_scales", "missing", "scales: `k` is i8");
    refused(
        but(dense(), |a| a.v_scales = Some(floats([1, 1, 1]))),
        "v_scales",
        "given",
        "`v` is f32",
    );
    refused(scaled(tensor(DType::F16, [1, 1, 1])), "k_scales", "f16", "f32");
    for shape in [&[1, 1][..], &[2, 5, 3], &[2, 4, 1], &[2, 5, 2, 1]] {
        let scales = Tensor::from_slice(&[1.0f32; 40][..shape.iter().product()], shape, None);
        refused(scaled(scales.unwrap()), "k_scales", "of shape", "[2, 5, 2], any of them 1");
    }
    static BROKEN: [[f32; 2]; 3] = [[1.0, f32::NAN], [1.0, -1.0], [1.0, f32::INFINITY]];
    for (scales, found) in BROKEN.iter().zip(["NaN", "-1", "inf"]) {
        let scales = Tensor::new(scales, [1, 1, 2]).unwrap();
        refused(scaled(scales), "k_scales[0, 0, 1]", found, "a finite number from 0 up");
    }
    let blocks = with_k(Tensor::new(&BLOCKS, [2, 5, 2, 1]).unwrap());
    refused(blocks, "k", "of head dim 32", "8, as q has");
    let odd = Problem { key_dtype: DType::Q4_0, head_dim: 48, ..dense_problem() };
    let error = odd.validate().unwrap_err().to_string();
    assert!(error.contains("head_dim") && error.contains("48") && error.contains("multiple of 32"));
}

#[test]
fn types() {
    refused(with_q(tensor(DType::I32, [2, 3, 4, 8])), "q", "i32", "f32 or f16 or bf16");
    refused(with_k(tensor(DType::I32, [2, 5, 2, 8])), "k", "i32", "f32 or f16 or bf16 or e4m3");
    refused(with_v(tensor(DType::Bool, [2, 5, 2, 4])), "v", "bool", "i8 or q8_0 or q4_0");
    let mask = tensor(DType::I32, [1, 1, 3, 5]);
    refused(but(dense(), |a| a.mask = Some(mask)), "mask", "i32", "bool or f32 or f16 or bf16");
    let halves = tensor(DType::F16, [4]);
    refused(but(dense(), |a| a.alibi_slopes = Some(halves)), "alibi_slopes", "f16", "f32");
    refused(but(dense(), |a| a.sinks = Some(halves)), "sinks", "f16", "f32");
    refused(but(dense(), |a| a.tree_mask = Some(floats([2, 3, 1]))), "tree_mask", "f32", "i32");
    refused(but(dense(), |a| a.kv_lens = Some(floats([2]))), "kv_lens", "f32", "i32");
    refused(
        but(dense(), |a| a.q_offset = QueryOffset::PerSequence(floats([2]))),
        "q_offset",
        "f32",
        "i32",
    );
    refused(but(ragged(), |a| a.cu_seqlens_q = Some(floats([3]))), "cu_seqlens_q", "f32", "i32");
    refused(but(ragged(), |a| a.cu_seqlens_k = Some(floats([3]))), "cu_seqlens_k", "f32", "i32");
    refused(but(paged(), |a| a.block_table = Some(floats([2, 3]))), "block_table", "f32", "i32");
}

#[test]
fn numbers() {
    for (scale, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        refused(but(dense(), |a| a.scale = Some(scale)), "scale", shown, "a finite number");
    }
    for scale in [3.4e38, -3.4e38, (1u64 << 61) as f32] {
        let allowed = "a finite number of magnitude at most 2^60 (1.15e18)";
        refused(but(dense(), |a| a.scale = Some(scale)), "scale", &scale.to_string(), allowed);
    }
    for (cap, shown) in [(0.0, "0"), (-3.5, "-3.5"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        refused(
            but(dense(), |a| a.softcap = Some(cap)),
            "softcap",
            shown,
            "a finite number above 0",
        );
    }
    for cap in [3e38, 1e-40, 4e-19, 2e18] {
        let allowed = "a finite number above 0, from 2^-60 (8.7e-19) to 2^60 (1.15e18)";
        refused(but(dense(), |a| a.softcap = Some(cap)), "softcap", &cap.to_string(), allowed);
    }
    accepted(&but(dense(), |a| (a.scale, a.softcap) = (Some(-1.15e18), Some(8.7e-19))));
    static NAN: [f32; 4] = [0.5, 0.25, f32::NAN, 0.125];
    static INFINITE: [f32; 4] = [0.5, f32::INFINITY, 0.25, 0.125];
    let (nan, infinite) = (Some(Tensor::from(&NAN)), Some(Tensor::from(&INFINITE)));
    refused(but(dense(), |a| a.alibi_slopes = nan), "alibi_slopes[2]", "NaN", "a finite number");
    refused(
        but(dense(), |a| a.alibi_slopes = infinite),
        "alibi_slopes[1]",
        "inf",
        "a finite number",
    );
    static STEEP: [f32; 4] = [0.5, 0.25, -1e38, 0.125];
    let steep = Some(Tensor::from(&STEEP));
    refused(but(dense(), |a| a.alibi_slopes = steep), "alibi_slopes[2]", "-1", "at most 2^60");
    accepted(&but(dense(), |a| a.sinks = steep));
    refused(
        but(dense(), |a| a.sinks = nan),
        "sinks[2]",
        "NaN",
        "a finite number or minus infinity",
    );
    refused(
        but(dense(), |a| a.sinks = infinite),
        "sinks[1]",
        "inf",
        "a finite number or minus infinity",
    );
    for offset in [1 << 31, -(1 << 31) - 1, i64::MAX, i64::MIN] {
        let inputs = but(dense(), |a| a.q_offset = QueryOffset::Same(offset));
        refused(inputs, "q_offset", &offset.to_string(), "-2^31..2^31");
    }
}

#[test]
fn positions_of_keys() {
    let at = |offset, stride| KeyPositions { offset, stride };
    let with = |positions: KeyPositions<_>| {
        but(dense(), |a| {
            a.q_offset = QueryOffset::Same(9);
            a.key_positions = Some(positions);
        })
    };
    accepted(&with(at(KeyOffset::Same(i64::from(i32::MIN)), MAX_KEY_STRIDE)));
    accepted(&with(at(KeyOffset::PerSequence(ints(&[-1, 7], [2])), 1)));
    let alone = but(dense(), |a| a.key_positions = Some(at(KeyOffset::Same(0), 1)));
    refused(alone, "q_offset", "not given", "given, because key_positions is");
    for stride in [0, MAX_KEY_STRIDE + 1, usize::MAX] {
        let found = stride.to_string();
        refused(with(at(KeyOffset::Same(0), stride)), "key_stride", &found, "1..=32768");
    }
    for offset in [1 << 31, -(1 << 31) - 1, i64::MAX, i64::MIN] {
        let inputs = with(at(KeyOffset::Same(offset), 1));
        refused(inputs, "key_offset", &offset.to_string(), "-2^31..2^31");
    }
    let three = KeyOffset::PerSequence(ints(&[0, 0, 0], [3]));
    refused(with(at(three, 1)), "key_offset", "[3]", "[2] (one per sequence)");
    let real = KeyOffset::PerSequence(floats([2]));
    refused(with(at(real, 1)), "key_offset", "f32", "i32");
    let tree = but(with(at(KeyOffset::Same(0), 2)), |a| {
        a.tree_mask = Some(tensor(DType::I32, [2, 3, 1]));
    });
    refused(tree, "tree_mask", "given", "none together with key_positions");
    // A plan is made with positions or without, and for a stride of 1 or for others.
    let machine = Machine::host().unwrap();
    let problem =
        |inputs: &Inputs| Problem::from_inputs(inputs, DType::F32, false).expect("sound operands");
    let [plain, contiguous, strided] = [
        problem(&dense()),
        problem(&with(at(KeyOffset::Same(0), 1))),
        problem(&with(at(KeyOffset::Same(4), 2))),
    ];
    let plan = Plan::new(&contiguous, &machine).unwrap();
    for other in [&plain, &strided] {
        let error = plan.problem().covers(other).unwrap_err().to_string();
        assert!(error.starts_with("`key_positions` is"), "{error}");
    }
    let three = problem(&with(at(KeyOffset::Same(-7), 3)));
    Plan::new(&strided, &machine).unwrap().problem().covers(&three).unwrap();
}

#[test]
fn vectors_of_the_wrong_shape() {
    let five = Some(floats([5]));
    refused(
        but(dense(), |a| a.alibi_slopes = five),
        "alibi_slopes",
        "[5]",
        "[4] (one per query head)",
    );
    refused(
        but(dense(), |a| a.sinks = Some(floats([4, 1]))),
        "sinks",
        "[4, 1]",
        "[4] (one per query head)",
    );
    refused(
        but(dense(), |a| a.kv_lens = Some(ints(&[5], [1]))),
        "kv_lens",
        "[1]",
        "[2] (one per sequence)",
    );
    let offsets = QueryOffset::PerSequence(ints(&[0, 0, 0], [3]));
    refused(but(dense(), |a| a.q_offset = offsets), "q_offset", "[3]", "[2] (one per sequence)");
    let one = Some(ints(&[0, 0, 0], [1, 3]));
    refused(
        but(paged(), |a| a.block_table = one),
        "block_table",
        "[1]",
        "[2] (one row per sequence)",
    );
    let flat = Some(ints(&[0, 0], [2]));
    refused(
        but(paged(), |a| a.block_table = flat),
        "block_table",
        "[2]",
        "2 dimensions: [B, max_blocks]",
    );
}

#[test]
fn lengths() {
    let lens =
        |inputs, values| but(inputs, |a: &mut Attention<_>| a.kv_lens = Some(ints(values, [2])));
    refused(lens(dense(), &[5, -1]), "kv_lens[1]", "-1", "0..=5");
    refused(lens(dense(), &[6, 0]), "kv_lens[0]", "6", "0..=5");
    refused(lens(dense(), &[i32::MIN, 0]), "kv_lens[0]", "-2147483648", "0..=5");
    refused(lens(ragged(), &[4, 3]), "kv_lens[1]", "3", "0..=2");
    refused(lens(paged(), &[13, 1]), "kv_lens[0]", "13", "0..=12");
    refused(
        but(paged(), |a| a.kv_lens = None),
        "kv_lens",
        "missing",
        "because block_table is given",
    );
}

#[test]
fn cumulative_lengths() {
    let q = |values: &'static [i32]| but(ragged(), |a| a.cu_seqlens_q = Some(Tensor::from(values)));
    let k = |values: &'static [i32]| but(ragged(), |a| a.cu_seqlens_k = Some(Tensor::from(values)));
    refused(q(&[1, 2, 3]), "cu_seqlens_q[0]", "1", "0");
    refused(q(&[-1, 2, 3]), "cu_seqlens_q[0]", "-1", "0");
    refused(q(&[0, 3, 2]), "cu_seqlens_q[2]", "2", "3..=3");
    refused(q(&[0, -2, 3]), "cu_seqlens_q[1]", "-2", "0..=3");
    refused(q(&[0, 2, 4]), "cu_seqlens_q[2]", "4", "2..=3");
    refused(q(&[0, 1, 2]), "cu_seqlens_q[2]", "2", "3 (all rows belong to a sequence)");
    refused(q(&[]), "cu_seqlens_q", "empty", "one entry more than there are sequences");
    refused(k(&[2, 4, 6]), "cu_seqlens_k[0]", "2", "0");
    refused(k(&[0, 5, 4]), "cu_seqlens_k[2]", "4", "5..=6");
    refused(k(&[0, 4, i32::MAX]), "cu_seqlens_k[2]", "2147483647", "4..=6");
    refused(k(&[0, 4, 5]), "cu_seqlens_k[2]", "5", "6 (all rows belong to a sequence)");
    refused(k(&[0, 6]), "cu_seqlens_k", "[2]", "[3] (one more than sequences)");
    let matrix = Some(ints(&[0, 2, 3], [3, 1]));
    refused(but(ragged(), |a| a.cu_seqlens_q = matrix), "cu_seqlens_q", "[3, 1]", "[3] (one more");
    let both = but(paged(), |a| a.cu_seqlens_k = Some(ints(&[0, 12, 24], [3])));
    refused(both, "cu_seqlens_k", "together with a block table of shape [2, 3]", "one of the two");
}

#[test]
fn block_tables() {
    let table =
        |values| but(paged(), |a: &mut Attention<_>| a.block_table = Some(ints(values, [2, 3])));
    refused(
        table(&[3, 6, -1, 5, 1, -1]),
        "block_table[0, 1]",
        "6",
        "0..6: keys 0..5 of the sequence are visible",
    );
    refused(table(&[3, 0, -1, -1, 1, -1]), "block_table[1, 0]", "-1", "0..6: keys 0..7");
    refused(table(&[3, i32::MIN, -1, 5, 1, -1]), "block_table[0, 1]", "-2147483648", "0..6");
    // The third block of neither sequence is in use: -1 there is fine, and so is any other number.
    accepted(&table(&[3, 0, -1, 5, 1, i32::MAX]));
    // Rows at positions 4, 5 and 6 that see only their own key: no row sees the keys 0..4 of the
    // first block.
    let alone = but(table(&[-1, 0, -1, -7, 1, -1]), |a| {
        a.q_offset = QueryOffset::Same(4);
        a.window = Window { left: Some(0), right: None };
    });
    accepted(&alone);
    let earlier = but(alone, |a| a.q_offset = QueryOffset::Same(3));
    refused(earlier, "block_table[0, 0]", "-1", "0..6: keys 3..5");
}

#[test]
fn masks() {
    let mask =
        |shape| but(dense(), |a: &mut Attention<_>| a.mask = Some(tensor::<4>(DType::Bool, shape)));
    refused(mask([3, 1, 3, 5]), "mask", "[3, 1, 3, 5]", "1 or 2 in dimension 0 (batch)");
    refused(mask([1, 2, 3, 5]), "mask", "[1, 2, 3, 5]", "1 or 4 in dimension 1 (heads)");
    refused(mask([1, 1, 2, 5]), "mask", "[1, 1, 2, 5]", "1, or at least 3, in dimension 2 (rows)");
    refused(mask([1, 1, 3, 4]), "mask", "[1, 1, 3, 4]", "1, or at least 5, in dimension 3 (keys)");
    refused(mask([1, 1, 0, 5]), "mask", "[1, 1, 0, 5]", "1, or at least 3, in dimension 2 (rows)");
    refused(mask([0, 1, 3, 5]), "mask", "[0, 1, 3, 5]", "1 or 2 in dimension 0 (batch)");
    let flat = but(dense(), |a| a.mask = Some(tensor(DType::Bool, [3, 5])));
    refused(flat, "mask", "[3, 5]", "4 dimensions: [B, Hq, Lq, Lk]");
    let tree = |shape| {
        but(dense(), |a: &mut Attention<_>| a.tree_mask = Some(tensor::<3>(DType::I32, shape)))
    };
    refused(tree([2, 3, 2]), "tree_mask", "[2, 3, 2]", "[2, 3, 1] ([B, Lq, ceil(Lq / 32)])");
    refused(tree([1, 3, 1]), "tree_mask", "[1, 3, 1]", "[2, 3, 1]");
    refused(tree([2, 4, 1]), "tree_mask", "[2, 4, 1]", "[2, 3, 1]");
    let flat = but(dense(), |a| a.tree_mask = Some(tensor(DType::I32, [2, 3])));
    refused(flat, "tree_mask", "[2, 3]", "[2, 3, 1]");
}

#[test]
fn claims_too_large_to_count() {
    refused(with_q(claiming([1 << 60, 3, 4, 8])), "batch", "1152921504606846976", "0..=2147483647");
    refused(
        with_q(claiming([usize::MAX, 3, 4, 8])),
        "batch",
        "18446744073709551615",
        "0..=2147483647",
    );
    refused(
        with_q(claiming([2, usize::MAX, 4, 8])),
        "query_len",
        "18446744073709551615",
        "0..=2147483647",
    );
    let keys =
        Inputs { k: claiming([2, 1 << 60, 2, 8]), v: claiming([2, 1 << 60, 2, 4]), ..dense() };
    refused(keys, "kv_len", "1152921504606846976", "0..=2147483647");
    let heads = Inputs {
        q: claiming([1, 1 << 30, 1 << 30, 8]),
        k: claiming([1, 5, 2, 8]),
        v: claiming([1, 5, 2, 4]),
        ..dense()
    };
    refused(
        heads,
        "query_len",
        "1073741824 x 1 sequences x 1073741824 heads",
        "fewer than 2^51 rows",
    );
    let rows = Inputs { q: claiming([1 << 60, 4, 8]), ..ragged() };
    refused(rows, "query rows", "1152921504606846976", "0..=2147483647");
    let rows = Inputs { k: claiming([1 << 60, 2, 8]), ..ragged() };
    refused(rows, "key rows", "1152921504606846976", "0..=2147483647");
    // No element, but so many sequences that one more overflows.
    let none = Inputs {
        q: claiming([usize::MAX, 0, 4, 8]),
        ..but(dense(), |a| a.cu_seqlens_k = Some(ints(&[0], [1])))
    };
    refused(none, "batch", "18446744073709551615", "0..=2147483647");
    // A sound problem whose output no memory holds: 2^49 rows of 512 numbers.
    let (q, k) = (claiming([1, 1 << 30, 1 << 19, 512]), claiming([1, 1, 1, 512]));
    let error = attention::<f32>(q, k, k, &Attention::default()).unwrap_err();
    expect(error, "out", &format!("{} elements", 1u64 << 58), "what fits in memory");
}

#[test]
fn nothing_to_do_is_fine() {
    for inputs in [dense(), ragged(), paged()] {
        accepted(&inputs);
    }
    let none = Inputs {
        q: floats([0, 3, 4, 8]),
        k: floats([0, 5, 2, 8]),
        v: floats([0, 5, 2, 4]),
        ..dense()
    };
    accepted(&none);
    accepted(&with_q(floats([2, 0, 4, 8])));
    accepted(&Inputs { k: floats([2, 0, 2, 8]), v: floats([2, 0, 2, 4]), ..dense() });
    accepted(&but(dense(), |a| a.kv_lens = Some(ints(&[0, 0], [2]))));
    accepted(&but(ragged(), |a| a.cu_seqlens_q = Some(ints(&[0, 0, 3], [3]))));
    let no_sequences = Attention {
        cu_seqlens_q: Some(ints(&[0], [1])),
        cu_seqlens_k: Some(ints(&[0], [1])),
        ..Attention::default()
    };
    accepted(&Inputs::new(floats([0, 4, 8]), floats([0, 2, 8]), floats([0, 2, 4]), no_sequences));
    accepted(&but(paged(), |a| {
        a.block_table = Some(ints(&[], [2, 0]));
        a.kv_lens = Some(ints(&[0, 0], [2]));
    }));
}

/// The error of the dense problem for these outputs.
fn run_dense(out: TensorMut, lse: Option<TensorMut>) -> Error {
    let inputs = dense();
    let plan = host_plan(&Problem { lse: lse.is_some(), ..dense_problem() });
    let mut outputs = Outputs { out, lse };
    let error = Problem::from_operands(&inputs, &outputs).unwrap_err();
    let mut workspace = vec![0; plan.workspace_bytes()];
    assert_eq!(plan.run(&inputs, &mut outputs, &mut workspace).unwrap_err(), error);
    error
}

#[test]
fn outputs() {
    let mut out = [SENTINEL; 192];
    let mut lse = [SENTINEL; 96];
    for (shape, strides, found, allowed) in [
        ([2, 3, 4, 3], [36, 12, 3, 1], "[2, 3, 4, 3]", "[2, 3, 4, 4] (as q, with v's head dim)"),
        ([2, 4, 3, 4], [48, 12, 4, 1], "[2, 4, 3, 4]", "[2, 3, 4, 4] (as q"),
        ([2, 3, 4, 4], [96, 32, 8, 2], "strides [96, 32, 8, 2]", "an innermost stride of 1"),
        ([2, 3, 4, 4], [48, 16, 2, 1], "strides [48, 16, 2, 1]", "a place of its own"),
        ([2, 3, 4, 4], [0, 16, 4, 1], "strides [0, 16, 4, 1]", "a place of its own"),
    ] {
        let view = TensorMut::with_strides(&mut out, shape, strides).expect("inside the slice");
        expect(run_dense(view, None), "out", found, allowed);
    }
    expect(run_dense(view(&mut out, &[6, 4, 4]), None), "out", "[6, 4, 4]", "[2, 3, 4, 4]");
    let shape = [2, 3, 4, 4];
    let error = run_dense(view(&mut out, &shape), Some(view(&mut lse, &[2, 4, 3])));
    expect(error, "lse", "[2, 4, 3]", "[2, 3, 4] (as out, without its last dimension)");
    let folded =
        TensorMut::with_strides(&mut lse, [2, 3, 4], [12, 4, 0]).expect("inside the slice");
    let error = run_dense(view(&mut out, &shape), Some(folded));
    expect(error, "lse", "strides [12, 4, 0]", "a place of its own");

    let mut halves = [f16::MAX; 96];
    let half = TensorMut::new(&mut halves[..24], [2, 3, 4]).expect("contiguous");
    expect(run_dense(view(&mut out, &shape), Some(half)), "lse", "f16", "f32");
    let half = TensorMut::new(&mut halves, shape).expect("contiguous");
    let error = run_dense(half, None);
    assert_eq!(error.to_string(), "`out_dtype` is of type f16; allowed: f32");
    assert!(halves.iter().all(|&x| x == f16::MAX));
    assert!(out.iter().chain(&lse).all(|&x| x == SENTINEL));
}

/// The error of the dense inputs under another problem's plan.
fn run_under(problem: &Problem) -> Result<(), Error> {
    let plan = host_plan(problem);
    let mut out = [SENTINEL; 96];
    let mut outputs = Outputs { out: view(&mut out, &[2, 3, 4, 4]), lse: None };
    let result = plan.run(&dense(), &mut outputs, &mut vec![0; plan.workspace_bytes()]);
    assert_eq!(result.is_err(), out.iter().all(|&x| x == SENTINEL), "written only if it ran");
    result
}

#[test]
fn inputs_larger_or_other_than_planned() {
    run_under(&dense_problem()).expect("as planned");
    run_under(&Problem { batch: 9, query_len: 40, kv_len: 1000, ..dense_problem() })
        .expect("smaller than planned");
    let change = |change: fn(&mut Problem)| {
        let mut problem = dense_problem();
        change(&mut problem);
        run_under(&problem).expect_err("not as planned")
    };
    expect(change(|p| p.batch = 1), "batch", "2", "at most 1, as planned");
    expect(change(|p| p.query_len = 2), "query_len", "3", "at most 2, as planned");
    expect(change(|p| p.kv_len = 4), "kv_len", "5", "at most 4, as planned");
    expect(change(|p| p.query_heads = 2), "query_heads", "4", "2, as planned");
    expect(change(|p| p.kv_heads = 4), "kv_heads", "2", "4, as planned");
    expect(change(|p| p.head_dim = 16), "head_dim", "8", "16, as planned");
    expect(change(|p| p.value_dim = 8), "value_dim", "4", "8, as planned");
    expect(change(|p| p.lse = true), "lse", "not given", "given, as planned");
    expect(change(|p| p.batch_invariant = true), "batch_invariant", "false", "true, as planned");
    expect(change(|p| p.keys = KvStorage::Ragged), "keys", "Batched", "Ragged, as planned");
    expect(
        change(|p| p.queries = QueryStorage::Ragged { total: 6 }),
        "queries",
        "Batched",
        "Ragged",
    );
    expect(change(|p| p.variant.causal = true), "causal", "false", "true, as planned");
    expect(change(|p| p.variant.window.left = Some(4)), "window", "left: None", "left: Some(4)");
    expect(change(|p| p.variant.softcap = true), "softcap", "not given", "given, as planned");
    expect(change(|p| p.variant.alibi = true), "alibi_slopes", "not given", "given, as planned");
    expect(change(|p| p.variant.sinks = true), "sinks", "not given", "given, as planned");
    expect(
        change(|p| p.variant.mask = Some(DType::Bool)),
        "mask",
        "not given",
        "given, as planned",
    );
    expect(change(|p| p.variant.tree = true), "tree_mask", "not given", "given, as planned");
    let halves = change(|p| *p = p.clone().with_dtype(DType::F16));
    expect(halves, "dtype", "F32", "F16, as planned");

    let masked = |dtype| Problem {
        variant: Variant { mask: Some(dtype), ..Variant::default() },
        ..dense_problem()
    };
    expect(masked(DType::Bool).covers(&masked(DType::F32)).unwrap_err(), "mask", "f32", "bool");
    let rows = |total| Problem { queries: QueryStorage::Ragged { total }, ..dense_problem() };
    expect(rows(6).covers(&rows(7)).unwrap_err(), "query rows", "7", "at most 6, as planned");
    let blocks = |block_size| Problem { keys: KvStorage::Paged { block_size }, ..dense_problem() };
    expect(blocks(16).covers(&blocks(32)).unwrap_err(), "keys", "32", "16");
    let to = |out_dtype| Problem { out_dtype, ..dense_problem().with_dtype(DType::BF16) };
    let keys = |key_dtype| Problem { key_dtype, ..dense_problem() };
    expect(keys(DType::I8).covers(&keys(DType::F16)).unwrap_err(), "key_dtype", "F16", "I8");
    expect(
        to(DType::F32).covers(&to(DType::BF16)).unwrap_err(),
        "out_dtype",
        "BF16",
        "F32, as planned",
    );
}

#[test]
fn a_workspace_too_small() {
    let plan = host_plan(&dense_problem());
    let needed = plan.workspace_bytes();
    for given in [0, needed - 1] {
        let mut out = [SENTINEL; 96];
        let mut outputs = Outputs { out: view(&mut out, &[2, 3, 4, 4]), lse: None };
        let error = plan.run(&dense(), &mut outputs, &mut vec![0; given]).unwrap_err();
        expect(error, "workspace", &given.to_string(), &needed.to_string());
        assert!(out.iter().all(|&x| x == SENTINEL));
    }
}

#[test]
fn checking_and_running_sound_operands_allocates_nothing() {
    for inputs in [dense(), ragged(), paged()] {
        let inputs = but(inputs, |a| {
            a.mask = Some(tensor(DType::Bool, [1, 1, 3, 12]));
            a.sinks = Some(floats([4]));
            a.alibi_slopes = Some(floats([4]));
        });
        let (mut out, mut lse) = ([0.0f32; 96], [0.0f32; 24]);
        let mut shape = inputs.q.shape().to_vec();
        *shape.last_mut().expect("a head dim") = 4;
        let (out, lse) = (view(&mut out, &shape), view(&mut lse, &shape[..shape.len() - 1]));
        let mut outputs = Outputs { out, lse: Some(lse) };
        let plan = host_plan(&Problem::from_operands(&inputs, &outputs).expect("well-formed"));
        let mut workspace = vec![0; plan.workspace_bytes()];
        let before = ALLOCATIONS.get();
        let result = cpu::run(&plan, &inputs, &mut outputs, &mut workspace, &cpu::Inline);
        assert_eq!(ALLOCATIONS.get(), before, "a run allocates");
        result.expect("well-formed");
    }
}
