//! Memory that calls on a stream share: the workspace, which grows and is used again, under other
//! shapes, threads, streams and captured graphs; and results, which nothing zeroes beforehand.

use super::{bits, gpu, normal};
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::{DType, Device, Result, Tensor};
use regard::paged::{PageAllocator, Step};
use regard_candle::{
    Attention, CacheShape, Execution, PagedCache, attention, attention_of_step,
    attention_of_tables, attention_with_lse,
};
use std::sync::Arc;

/// A call, and the bits that it has given.
struct Call {
    q: Tensor,
    k: Tensor,
    options: Attention,
    expected: [Vec<u32>; 2],
}

impl Call {
    /// `[sequences, rows, keys, query heads]`, over one key/value head.
    fn new([b, rows, keys, heads]: [usize; 4], dtype: DType, device: &Device) -> Result<Call> {
        let q = normal(&[b, rows, heads, 64], dtype).to_device(device)?;
        let k = normal(&[b, keys, 1, 64], dtype).to_device(device)?;
        let call = Call { q, k, options: Attention::causal(), expected: Default::default() };
        let expected = call.run()?;
        Ok(Call { expected, ..call })
    }

    /// Output and log-sum-exp. Memory that the results may get holds NaN before.
    fn run(&self) -> Result<[Vec<u32>; 2]> {
        poison(&self.q)?;
        let (out, lse) = attention_with_lse(&self.q, &self.k, &self.k, &self.options)?;
        Ok([bits(&out), bits(&lse)])
    }

    fn check(&self, what: &str) -> Result<()> {
        let q = &self.q;
        assert!(self.run()? == self.expected, "{what}: {:?} {:?}", q.dtype(), q.dims());
        Ok(())
    }
}

/// Fills memory of the size of the tensor with NaN, and gives it back to the allocator.
fn poison(like: &Tensor) -> Result<()> {
    let nan = Tensor::full(f32::NAN, like.shape(), like.device())?.to_dtype(like.dtype())?;
    let rows = Tensor::full(f32::NAN, &like.dims()[..like.rank() - 1], like.device())?;
    drop((nan, rows));
    Ok(())
}

/// Workspaces from nothing to some MB: decode over few and many keys, and prefill.
const SHAPES: [[usize; 4]; 6] = [
    [1, 1, 40, 4],
    [1, 1, 9000, 8],
    [2, 7, 33, 6],
    [40, 1, 3000, 16],
    [1, 300, 300, 4],
    [3, 20, 1000, 32],
];

fn calls(device: &Device) -> Result<Vec<Call>> {
    let mut calls = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for shape in SHAPES {
            calls.push(Call::new(shape, dtype, device)?);
        }
    }
    Ok(calls)
}

/// In an order that is another in each round and thread.
fn check_all(calls: &[Call], rounds: usize, first: usize) -> Result<()> {
    for round in 0..rounds {
        for i in 0..calls.len() {
            // Steps that have no factor in common with the number of calls.
            let step = [1, 5, 7, 11][(round + first) % 4];
            let index = (first + i * step) % calls.len();
            calls[index].check(&format!("round {round} of {first}, call {index}"))?;
        }
    }
    Ok(())
}

#[test]
fn repeated_calls_have_the_same_bits_with_other_shapes_between() -> Result<()> {
    let name = "repeated_calls_have_the_same_bits_with_other_shapes_between";
    let Some(device) = gpu(name) else { return Ok(()) };
    check_all(&calls(&device)?, 4, 0)?;
    let own = Device::new_cuda_with_stream(0)?;
    check_all(&calls(&own)?, 4, 0)
}

#[test]
fn threads_and_streams_do_not_share_what_they_write() -> Result<()> {
    let name = "threads_and_streams_do_not_share_what_they_write";
    let Some(device) = gpu(name) else { return Ok(()) };
    // One stream per thread; one stream that two threads use; another one.
    let [shared, other] = [(); 2].map(|()| Device::new_cuda_with_stream(0));
    let devices = [device.clone(), device, shared?, other?];
    let calls = devices.iter().map(calls).collect::<Result<Vec<_>>>()?;
    for device in &devices {
        // Threads read what this one has written.
        device.synchronize()?;
    }
    std::thread::scope(|scope| {
        let runs = [0, 1, 2, 2, 3].map(|i| {
            let calls = &calls[i];
            scope.spawn(move || check_all(calls, 6, i))
        });
        runs.into_iter().try_for_each(|run| run.join().expect("no panic"))
    })
}

#[test]
fn a_stream_that_is_gone_is_let_go() -> Result<()> {
    let Some(_) = gpu("a_stream_that_is_gone_is_let_go") else { return Ok(()) };
    let call = |device: &Device| Call::new(SHAPES[1], DType::BF16, device)?.check("a new stream");
    let first = Device::new_cuda_with_stream(0)?;
    let stream = Arc::downgrade(&first.as_cuda_device()?.cuda_stream());
    call(&first)?;
    drop(first);
    call(&Device::new_cuda_with_stream(0)?)?;
    assert!(stream.upgrade().is_none(), "the stream is alive without a device or a tensor");
    Ok(())
}

#[test]
fn plans_are_made_once() -> Result<()> {
    let Some(device) = gpu("plans_are_made_once") else { return Ok(()) };
    let tensor = |rows| normal(&[1, rows, 2, 64], DType::F16).to_device(&device);
    let (q, k) = (tensor(1)?, tensor(40)?);
    let plan = |options: &Attention, q: &Tensor| Execution::default().plan(q, &k, &k, options);
    let first = plan(&Attention::causal(), &q)?;
    let others = [plan(&Attention::default(), &q)?, plan(&Attention::causal(), &tensor(2)?)?];
    assert!(others.iter().all(|other| !Arc::ptr_eq(other, &first)));
    attention(&q, &k, &k, &Attention::causal())?;
    assert!(Arc::ptr_eq(&plan(&Attention::causal(), &tensor(1)?)?, &first));
    Ok(())
}

/// Rows that see no key, and rows that no sequence has, in memory that held NaN.
#[test]
fn rows_without_keys_or_sequence_are_zeros() -> Result<()> {
    let Some(device) = gpu("rows_without_keys_or_sequence_are_zeros") else { return Ok(()) };
    let numbers = |numbers: &[u32]| Tensor::new(numbers, &device);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let q = normal(&[3, 5, 4, 64], dtype).to_device(&device)?;
        let k = normal(&[3, 20, 2, 64], dtype).to_device(&device)?;
        let lens = Attention { kv_lens: Some(numbers(&[9, 0, 2])?), ..Attention::causal() };
        poison(&q)?;
        let (out, lse) = attention_with_lse(&q, &k, &k, &lens)?;
        let (out, lse) = (bits(&out), bits(&lse));
        // The second sequence, and of the third all rows but the last two.
        let (row, head) = (4 * 64, 64);
        let empty = 5 * row..13 * row;
        assert!(out[empty.clone()].iter().all(|&x| x << 1 == 0), "{dtype:?}: rows without keys");
        let infinite = f32::NEG_INFINITY.to_bits();
        assert!(lse[empty.start / head..empty.end / head].iter().all(|&x| x == infinite));
        assert!(out[..5 * row].iter().all(|&x| f32::from_bits(x).is_finite()));

        let (q, k) = (q.flatten(0, 1)?, k.flatten(0, 1)?);
        // Rows 0, 1 and 10 to 14 are of no sequence.
        let ragged = Attention {
            cu_seqlens_q: Some(numbers(&[2, 5, 5, 10])?),
            cu_seqlens_k: Some(numbers(&[0, 20, 40, 60])?),
            ..Attention::causal()
        };
        poison(&q)?;
        let (out, lse) = attention_with_lse(&q, &k, &k, &ragged)?;
        let (out, lse) = (bits(&out), bits(&lse));
        for outside in [0..2, 10..15] {
            assert!(out[outside.start * row..outside.end * row].iter().all(|&x| x == 0));
            assert!(lse[outside.start * 4..outside.end * 4].iter().all(|&x| x == 0));
        }

        // All rows have a sequence: the same without zeroing.
        let whole = Attention { cu_seqlens_q: Some(numbers(&[0, 5, 5, 15])?), ..ragged };
        let covered = Execution { covers_all_rows: true, ..Execution::default() };
        let expected = bits(&attention(&q, &k, &k, &whole)?);
        poison(&q)?;
        assert!(bits(&covered.attention(&q, &k, &k, &whole)?) == expected, "{dtype:?}");
    }
    Ok(())
}

/// Steps of one token in a graph: an append and attention, which replays with other lengths, while
/// the workspace of its stream is used and grows.
#[test]
fn captured_calls_keep_their_memory() -> Result<()> {
    let Some(_) = gpu("captured_calls_keep_their_memory") else { return Ok(()) };
    let device = Device::new_cuda_with_stream(0)?;
    // SAFETY: everything here is on one stream, and events from outside cannot be waited for by
    // what is captured.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    let stream = device.as_cuda_device()?.cuda_stream();
    let shape = CacheShape { layers: 2, blocks: 400, block_size: 16, kv_heads: 2, head_dim: 64 };
    let cache = PagedCache::new(shape, DType::BF16, &device)?;
    let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound sizes");
    let sequences: Vec<_> = (0..3).map(|_| pages.create()).collect();
    let mut step = Step::new();
    let mut fill = |tokens: [usize; 3], step: &mut Step| {
        step.clear();
        for (&sequence, tokens) in sequences.iter().zip(tokens) {
            step.append(&mut pages, sequence, tokens).expect("room");
        }
        step.finish(&pages).expect("alive");
    };
    // A whole page more than before in none of these steps: tables stay as wide as they are.
    fill([1000, 33, 2001], &mut step);
    let normal = |shape: &[usize]| normal(shape, DType::BF16).to_device(&device);
    let rows = normal(&[step.tokens(), 2, 64])?;
    let options = attention_of_step(&step, &device)?;
    (0..2).try_for_each(|layer| cache.append(layer, &rows, &rows, &options))?;

    let (q, rows) = (normal(&[3, 8, 64])?, normal(&[3, 2, 64])?);
    let result = Tensor::zeros((3, 8, 64), DType::BF16, &device)?;
    let layers = |step: &Step, options: &Attention, q: &Tensor| -> Result<Tensor> {
        let mut x = q.clone();
        for layer in 0..2 {
            cache.append(layer, &rows, &rows, options)?;
            x = cache.attention(layer, &x, options, &Execution::of_step(step))?;
        }
        Ok(x)
    };
    fill([1; 3], &mut step);
    // As u32: candle does not copy between tensors of i32.
    let upload = |step: &Step| {
        let packed: Vec<u32> = step.packed().iter().map(|&entry| entry as u32).collect();
        Tensor::new(packed, &device)
    };
    let tables = upload(&step)?;
    let layout = step.table_layout();
    let held = attention_of_tables(&tables, &layout)?;
    // Loads kernels.
    layers(&step, &held, &q)?;
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).map_err(candle_core::Error::wrap)?;
    let queued = layers(&step, &held, &q).and_then(|out| result.slice_set(&out, 0, 0));
    let graph =
        stream.end_capture(CUgraphInstantiate_flags(0)).map_err(candle_core::Error::wrap)?;
    queued?;
    let graph = graph.expect("a capture");

    let mut large = Vec::new();
    for round in 0..4 {
        if round > 0 {
            fill([1; 3], &mut step);
            assert_eq!(step.table_layout(), layout, "the graph has tables of this size");
            tables.slice_set(&upload(&step)?, 0, 0)?;
        }
        let expected = bits(&layers(&step, &attention_of_step(&step, &device)?, &q)?);
        result.slice_set(&q, 0, 0)?;
        graph.launch().map_err(candle_core::Error::wrap)?;
        // Behind the graph, and at other times before its result is looked at.
        large.push(Call::new(SHAPES[2 * round % 6 + 1], DType::BF16, &device)?);
        assert!(bits(&result) == expected, "round {round}");
        large.iter().try_for_each(|call| call.check("between replays"))?;
    }
    Ok(())
}
