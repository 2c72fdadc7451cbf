//! Compositions that failed once on some device, each a description as the shrinker left it. The
//! list of cases cannot hold them: they need outputs with gaps, other plans, or chunks, which only
//! [`trial`](super::trial()) makes.

use crate::contents::{Contents, Numbers, Sinks, Slopes};
use crate::place::MemorySpec;
use crate::spec::{CacheSpec, Entries, Keys, ListSpec, OffsetSpec, Spec};
use regard::{DType, Window};

/// The compositions.
pub fn known() -> Vec<Spec> {
    let spec = |name: &str, dtype, dims: (usize, usize), lengths: (usize, usize)| {
        let spec = Spec::new(format!("known/{name}-{dtype}")).heads(1, 1).lengths(&[lengths]);
        spec.dims(dims.0, dims.1).dtype(dtype)
    };
    let mut specs = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        // The tensor copy engine writes 16 bytes at a time: with head dims between, it wrote into
        // the gap behind a row.
        for dim in [7, 22, 100] {
            let one = spec("output-with-gaps", dtype, (dim, dim), (65, 1));
            specs.push(Spec { padding: 1, ..one.clone() });
            let out = MemorySpec { gaps: [0, 3, 5], ..MemorySpec::default() };
            let memory = crate::spec::OperandMemory { out, ..one.memory };
            specs.push(Spec { memory, ..one });
        }
        // A maximum of rounded sums under exponents of exact sums: far above 0 if biases or scores
        // are huge.
        let slopes = |one: Spec| Spec { alibi: true, slope_kind: Slopes::Extreme, ..one };
        specs.push(slopes(spec("largest-slopes", dtype, (8, 8), (65, 1))));
        let offset = OffsetSpec::PerSequence(vec![8, -1955]);
        let two = Spec::new(format!("known/largest-slopes-and-offsets-{dtype}"))
            .lengths(&[(65, 1), (65, 90)]);
        specs.push(slopes(Spec { causal: true, offset, ..two.dims(8, 8).dtype(dtype) }));
        let huge = Numbers::Scaled(1000.0);
        let contents = Contents { q: huge, k: huge, v: Numbers::Scaled(1e30) };
        specs.push(Spec { contents, ..spec("huge-operands", dtype, (1, 1), (65, 1)) });
        // Sums of one sign, cut off at every step by a matrix unit.
        let contents = Contents { q: Numbers::Positive, k: Numbers::Positive, v: Numbers::Normal };
        let one = spec("positive-keys", dtype, (576, 1), (1, 19));
        specs.push(Spec { scale: Some(1.0), contents, ..one });
        // The same in prefill, with values that a tensor copy engine reads and with others.
        for value_dim in [1, 448] {
            let one = spec("positive-keys-in-prefill", dtype, (448, value_dim), (65, 19));
            specs.push(Spec { contents, ..one });
        }
    }
    // Sinks so far above a stale maximum that the factor of the output was subnormal, and the
    // output was not: some of many heads.
    let contents = Contents { q: Numbers::Scaled(3.0), ..Contents::default() };
    let one = spec("sinks-above-stale-maxima", DType::BF16, (8, 8), (129, 300)).heads(256, 1);
    specs.push(Spec { sinks: true, sink_kind: Sinks::Large, contents, ..one });
    // Keys in blocks under queries with an outlier: a matrix unit truncated products with codes in
    // the lowest bits of a number.
    let contents = Contents { q: Numbers::Outliers, k: Numbers::Positive, ..Contents::default() };
    for format in [DType::Q8_0, DType::Q4_0] {
        let one = spec(&format!("outliers-in-queries-over-{format}"), DType::F16, (32, 1), (3, 3));
        let cache = CacheSpec { k: Some(format), ..CacheSpec::default() };
        specs.push(Spec { scale: Some(-0.3), contents, cache, ..one.heads(64, 64) });
    }
    // A few keys, listed again and again: sums of equal numbers, whose rounding errors add up.
    let contents = Contents { k: Numbers::Constant(0.0), ..Contents::default() };
    let lists = Some(ListSpec::new(1025, Entries::Any));
    let one = spec("keys-listed-often", DType::F32, (257, 5), (8, 5)).heads(8, 8);
    specs.push(Spec { contents, lists, ..one });
    // Rows of a chunk under a window: the warps that share a key depended on the start of the
    // chunk.
    let chunks = [
        (DType::BF16, (192, 72), Window { left: Some(2), right: None }),
        (DType::F32, (3, 62), Window { left: Some(34), right: None }),
        (DType::F16, (256, 167), Window { left: Some(1), right: Some(1) }),
    ];
    for (dtype, dims, window) in chunks {
        for keys in [Keys::Batched { slack: 0 }, Keys::Paged { block_size: 8, interleaved: false }]
        {
            let one = spec("chunks-under-a-window", dtype, dims, (31, 127)).heads(4, 2);
            specs.push(Spec {
                batch_invariant: true,
                causal: window.right.is_none(),
                window,
                keys,
                ..one
            });
        }
    }
    specs
}
