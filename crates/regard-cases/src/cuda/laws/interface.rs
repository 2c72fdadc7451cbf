//! The interface for cudarc's slices, and its refusals.

use super::{Broken, expect};
use crate::cuda::Runner;
use half::bf16;
use regard::cuda::{
    DeviceMemory, DeviceView, DeviceViewMut, Gpu, RawWorkspace, Workspace, driver_error,
};
use regard::oracle::Judge;
use regard::{Attention, DType, Error, Inputs, Machine, Outputs, Plan, Tensor, TensorMut};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

fn numbers(count: usize, seed: u64) -> Vec<bf16> {
    let mut noise = crate::noise::Noise::new(seed, &[]);
    (0..count).map(|_| bf16::from_f32(noise.normal())).collect()
}

/// Plain slices, one workspace for plans of several sizes.
pub fn slices_and_shared_workspace(runner: &mut Runner) -> Result<String, Broken> {
    let (gpu, stream) = (runner.gpu(), runner.stream());
    let doing = |error| Broken::from(driver_error("copying", error));
    let lengths = [(1, 5000), (40, 300), (1, 17), (1, 5000), (8, 2048)];
    let mut max_bytes = 0;
    for (q_len, kv_len) in lengths {
        let problem = problem(q_len, kv_len);
        max_bytes = max_bytes.max(Plan::new(&problem, gpu.machine())?.workspace_bytes());
    }
    // SAFETY: a workspace may hold anything.
    let memory = unsafe { stream.alloc::<u8>(max_bytes) }.map_err(doing)?;
    let mut workspace = Workspace::new(memory, stream)?;
    for (q_len, kv_len) in lengths {
        let (q, k, v) = (
            numbers(q_len * HEADS * DIM, 1),
            numbers(kv_len * KV_HEADS * DIM, 2),
            numbers(kv_len * KV_HEADS * DIM, 3),
        );
        let (q_shape, k_shape) = ([1, q_len, HEADS, DIM], [1, kv_len, KV_HEADS, DIM]);
        let device_q = stream.clone_htod(&q).map_err(doing)?;
        let device_k = stream.clone_htod(&k).map_err(doing)?;
        let device_v = stream.clone_htod(&v).map_err(doing)?;
        let mut device_out = stream.alloc_zeros::<bf16>(q.len()).map_err(doing)?;
        {
            let (q, k, v) = (
                DeviceView::new(&device_q, stream),
                DeviceView::new(&device_k, stream),
                DeviceView::new(&device_v, stream),
            );
            let mut out = DeviceViewMut::new(&mut device_out, stream);
            let inputs = Inputs::new(
                q.tensor(&q_shape, None)?,
                k.tensor(&k_shape, None)?,
                v.tensor(&k_shape, None)?,
                Attention::causal(),
            );
            let mut outputs = Outputs { out: out.tensor(&q_shape, None)?, lse: None };
            let plan = gpu.plan(&inputs, &outputs)?;
            gpu.run(&plan, stream, &inputs, &mut outputs, &mut workspace)?;
        }
        let out = stream.clone_dtoh(&device_out).map_err(doing)?;
        stream.synchronize().map_err(doing)?;
        let inputs = Inputs::new(
            Tensor::from_slice(&q, &q_shape, None)?,
            Tensor::from_slice(&k, &k_shape, None)?,
            Tensor::from_slice(&v, &k_shape, None)?,
            Attention::causal(),
        );
        let judge = Judge::new(&inputs, DType::BF16)?;
        judge
            .check(&Tensor::from_slice(&out, &q_shape, None)?, None)
            .map_err(|mismatch| Broken(format!("{q_len} x {kv_len}: {mismatch}")))?;
    }
    Ok(format!("{} problems over one workspace of {max_bytes} bytes", lengths.len()))
}

fn problem(q_len: usize, kv_len: usize) -> regard::Problem {
    regard::Problem {
        query_heads: HEADS,
        kv_heads: KV_HEADS,
        query_len: q_len,
        kv_len,
        variant: regard::Variant { causal: true, ..regard::Variant::default() },
        ..regard::Problem::new(DType::BF16, DIM)
    }
}

/// Expects an error whose text contains these words.
pub(super) fn expect_refused(
    what: &str,
    result: Result<(), Error>,
    words: &str,
) -> Result<(), Broken> {
    match result {
        Ok(()) => Err(Broken(format!("{what} was accepted"))),
        Err(error) => expect(error.to_string().contains(words), || {
            format!("{what}: \"{error}\" lacks \"{words}\"")
        }),
    }
}

/// Calls that must not run, and give the reason.
pub fn refusals(runner: &mut Runner) -> Result<String, Broken> {
    let (gpu, stream) = (runner.gpu(), runner.stream());
    let doing = |error| Broken::from(driver_error("allocating", error));
    let (q_shape, k_shape) = ([1, 4, HEADS, DIM], [1, 3000, KV_HEADS, DIM]);
    let q = stream.alloc_zeros::<bf16>(q_shape.iter().product()).map_err(doing)?;
    let k = stream.alloc_zeros::<bf16>(k_shape.iter().product()).map_err(doing)?;
    let mut out = stream.alloc_zeros::<bf16>(q_shape.iter().product()).map_err(doing)?;
    let other_stream = gpu.context().new_stream().map_err(doing)?;
    let lent = (DeviceView::new(&q, stream), DeviceView::new(&k, stream));
    let mut lent_out = DeviceViewMut::new(&mut out, stream);
    let view = lent.1.tensor(&k_shape, None)?;
    let inputs = Inputs::new(lent.0.tensor(&q_shape, None)?, view, view, Attention::causal());
    let mut outputs = Outputs { out: lent_out.tensor(&q_shape, None)?, lse: None };
    let plan = gpu.plan(&inputs, &outputs)?;
    let mut workspace = Workspace::for_plan(&plan, stream)?;
    expect(workspace.bytes() == plan.workspace_bytes(), || "a workspace of another size".into())?;

    // SAFETY: a workspace may hold anything, and this one is refused.
    let short = unsafe { stream.alloc::<u8>(plan.workspace_bytes() - 1) }.map_err(doing)?;
    let mut short = Workspace::new(short, stream)?;
    let run = gpu.run(&plan, stream, &inputs, &mut outputs, &mut short);
    expect_refused("a workspace one byte too small", run, "`workspace` is")?;

    let run = gpu.run(&plan, &other_stream, &inputs, &mut outputs, &mut workspace);
    expect_refused("another stream", run, "lent to another stream")?;

    let raw = |address, shape: &[usize]| {
        // SAFETY: the call is refused, so nothing is written.
        unsafe { TensorMut::<DeviceMemory>::from_device_address(address, DType::BF16, shape, None) }
    };
    let mut aliased = Outputs { out: raw(view.device_address(), &q_shape)?, lse: None };
    let run = gpu.run(&plan, stream, &inputs, &mut aliased, &mut workspace);
    expect_refused("an output in the keys", run, "memory shared with `k`")?;

    let address = inputs.q.device_address();
    // SAFETY: as above.
    let run = unsafe {
        gpu.run_raw(
            &plan,
            stream.cu_stream(),
            &inputs,
            &mut outputs,
            RawWorkspace { address, bytes: plan.workspace_bytes() },
        )
    };
    expect_refused("a workspace in the queries", run, "memory shared with `q`")?;
    // SAFETY: as above.
    let run = unsafe {
        let workspace = RawWorkspace { address: 8, bytes: plan.workspace_bytes() };
        gpu.run_raw(&plan, stream.cu_stream(), &inputs, &mut outputs, workspace)
    };
    expect_refused("a workspace that is not aligned", run, "a multiple of")?;

    expect_refused("a slice too short", lent.0.tensor(&k_shape, None).map(|_| ()), "`shape` is")?;
    let far = lent.0.tensor(&[1, 4, HEADS, DIM], Some(&[0, 1 << 40, 64, 1])).map(|_| ());
    expect_refused("strides out of the slice", far, "`strides` is")?;

    let cpu = Plan::new(&problem(4, 3000), &Machine::host()?)?;
    let run = gpu.run(&cpu, stream, &inputs, &mut outputs, &mut workspace);
    expect_refused("a plan for a CPU", run, "the plan is for that machine")?;
    let small = Plan::new(&problem(4, 2999), gpu.machine())?;
    let run = gpu.run(&small, stream, &inputs, &mut outputs, &mut workspace);
    expect_refused("more keys than planned", run, "`kv_len` is 3000")?;
    expect_refused("a GPU that is not here", Gpu::new(4096).map(|_| ()), "`device` is cuda:4096")?;

    gpu.run(&plan, stream, &inputs, &mut outputs, &mut workspace)?;
    stream.synchronize().map_err(doing)?;
    Ok("10 calls".into())
}
