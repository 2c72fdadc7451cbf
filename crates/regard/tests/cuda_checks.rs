//! Checks and refusals of the CUDA interface before any GPU is touched: here there need not be
//! one. Addresses are made up.
#![cfg(feature = "cuda")]

use regard::cuda::{self, DeviceMemory, Gpu};
use regard::{
    Attention, DType, Error, Inputs, KvStorage, Machine, Outputs, Plan, Problem, QueryStorage,
    Tensor, TensorMut,
};

/// A view of memory that is never read, each at another address.
fn tensor(place: u64, dtype: DType, shape: &[usize]) -> Tensor<'static, DeviceMemory> {
    // SAFETY: nothing is run, so nothing is read.
    unsafe { Tensor::from_device_address(place << 40, dtype, shape, None) }.unwrap()
}

fn output(place: u64, dtype: DType, shape: &[usize]) -> TensorMut<'static, DeviceMemory> {
    // SAFETY: nothing is run, so nothing is written.
    unsafe { TensorMut::from_device_address(place << 40, dtype, shape, None) }.unwrap()
}

fn ints(place: u64, shape: &[usize]) -> Option<Tensor<'static, DeviceMemory>> {
    Some(tensor(place, DType::I32, shape))
}

fn inputs(
    shapes: [&[usize]; 2],
    attention: Attention<Tensor<'static, DeviceMemory>>,
) -> Inputs<'static, DeviceMemory> {
    let [q, k] = shapes.map(|shape| (shape, DType::BF16));
    Inputs::new(tensor(1, q.1, q.0), tensor(2, k.1, k.0), tensor(3, k.1, k.0), attention)
}

fn problem(inputs: &Inputs<DeviceMemory>) -> Result<Problem, Error> {
    let out = output(4, DType::BF16, inputs.q.shape());
    Problem::from_operands(inputs, &Outputs { out, lse: None })
}

#[test]
fn lengths_that_only_the_device_knows_are_bounded_by_shapes() {
    let attention = Attention {
        kv_lens: ints(5, &[3]),
        block_table: ints(6, &[3, 20]),
        cu_seqlens_q: ints(7, &[4]),
        ..Attention::causal()
    };
    let paged = inputs([&[50, 8, 64], &[100, 16, 2, 64]], attention);
    let found = problem(&paged).unwrap();
    assert_eq!((found.batch, found.query_len, found.kv_len), (3, 50, 320));
    assert_eq!(found.queries, QueryStorage::Ragged { total: 50 });
    assert_eq!(found.keys, KvStorage::Paged { block_size: 16 });

    // A mask or a tree that has a place for fewer bounds them too.
    let mask = Some(tensor(8, DType::Bool, &[1, 1, 9, 200]));
    let found = problem(&Inputs { attention: Attention { mask, ..attention }, ..paged }).unwrap();
    assert_eq!((found.query_len, found.kv_len), (9, 200));
    let tree_mask = ints(9, &[3, 40, 2]);
    let found =
        problem(&Inputs { attention: Attention { tree_mask, ..attention }, ..paged }).unwrap();
    assert_eq!(found.query_len, 40);

    // Known lengths are held to.
    let dense =
        inputs([&[2, 5, 8, 64], &[2, 30, 2, 64]], Attention { mask, ..Attention::default() });
    assert_eq!(problem(&dense).unwrap().kv_len, 30);
    let short = Some(tensor(8, DType::Bool, &[1, 1, 5, 29]));
    let error =
        problem(&Inputs { attention: Attention { mask: short, ..Attention::default() }, ..dense });
    assert!(error.unwrap_err().to_string().starts_with("`mask` is of shape [1, 1, 5, 29]"));
}

#[test]
fn outputs_and_inputs_may_not_share_memory() {
    let inputs = inputs([&[1, 4, 8, 64], &[1, 30, 2, 64]], Attention::causal());
    let error = Problem::from_operands(
        &inputs,
        &Outputs { out: output(2, DType::BF16, &[1, 4, 8, 64]), lse: None },
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        "`out` is memory shared with `k`; allowed: memory of its own"
    );
}

#[test]
fn addresses_are_aligned() {
    // SAFETY: nothing is run, so nothing is read.
    let error =
        unsafe { Tensor::<DeviceMemory>::from_device_address(0x1002, DType::F32, &[4], None) };
    assert_eq!(
        error.unwrap_err().to_string(),
        "`address` is 0x1002; allowed: a multiple of 4 for f32"
    );
}

#[test]
fn a_plan_for_a_gpu_is_not_run_by_the_cpu() {
    let problem =
        problem(&inputs([&[1, 1, 8, 128], &[1, 4096, 2, 128]], Attention::causal())).unwrap();
    let Ok(plan) = Plan::new(&problem, &"h200".parse::<Machine>().unwrap()) else { return };
    let (q, k) = (vec![regard::bf16::ZERO; 8 * 128], vec![regard::bf16::ZERO; 4096 * 2 * 128]);
    let k = Tensor::new(&k, [1, 4096, 2, 128]).unwrap();
    let inputs = Inputs::new(Tensor::new(&q, [1, 1, 8, 128]).unwrap(), k, k, Attention::causal());
    let mut out = vec![regard::bf16::ZERO; 8 * 128];
    let mut outputs = Outputs { out: TensorMut::new(&mut out, [1, 1, 8, 128]).unwrap(), lse: None };
    let error = plan.run(&inputs, &mut outputs, &mut vec![0; plan.workspace_bytes()]).unwrap_err();
    assert!(
        matches!(error, Error::Refused(_)) && error.to_string().contains("not for the CPU"),
        "{error}"
    );
}

#[test]
fn without_a_driver_the_answer_is_a_reason() {
    match cuda::gpus() {
        Ok(gpus) => assert!(Gpu::new(gpus.len()).is_err()),
        Err(error) => {
            assert!(matches!(error, Error::Refused(_)), "{error}");
            assert!(error.to_string().contains("driver"), "{error}");
            assert_eq!(Gpu::new(0).unwrap_err(), error);
        }
    }
}

#[test]
fn the_parts_of_many_rows_are_combined_by_a_kernel_of_their_own() {
    let h200 = "h200".parse::<Machine>().unwrap();
    let plan = |rows: usize, sequences: usize, attention| {
        let inputs = inputs([&[sequences, rows, 32, 128], &[sequences, 4096, 8, 128]], attention);
        Plan::new(&problem(&inputs).unwrap(), &h200).unwrap()
    };
    let combine = |plan: &Plan| plan.cuda().unwrap().decode.as_ref().unwrap().combine;
    let verify = plan(8, 1, Attention::causal());
    let found = combine(&verify).unwrap();
    // 8 tiles of 32 rows.
    assert_eq!((found.entry, found.grid), ("combine", [8, 4, 1]));
    // Behind the partial states, 128 bytes per CTA.
    let schedule = verify.cuda().unwrap().decode.as_ref().unwrap().schedule.unwrap();
    let ctas = schedule.launch.grid[0] as usize;
    assert_eq!(schedule.at + 128 * ctas, verify.workspace_bytes());
    // One row; tiles without CTAs to share; parts that are combined in an order of their own.
    assert_eq!(combine(&plan(1, 1, Attention::causal())), None);
    assert_eq!(combine(&plan(8, 32, Attention::causal())), None);
    assert_eq!(
        combine(&plan(8, 1, Attention { batch_invariant: true, ..Attention::causal() })),
        None
    );
}

#[test]
fn a_run_of_fewer_keys_copies_in_fewer_parts() {
    let h200 = "h200".parse::<Machine>().unwrap();
    let call = |keys: usize| {
        let scales = Some(tensor(8, DType::F32, &[1, 1, 8]));
        let attention = Attention { k_scales: scales, v_scales: scales, ..Attention::causal() };
        let cache = |place| tensor(place, DType::E4M3, &[1, keys, 8, 128]);
        let q = tensor(1, DType::BF16, &[1, 2048, 32, 128]);
        let outputs = Outputs { out: output(4, DType::BF16, q.shape()), lse: None };
        (Inputs::new(q, cache(2), cache(3), attention), outputs)
    };
    let (inputs, outputs) = call(600_000);
    let plan = Plan::new(&Problem::from_operands(&inputs, &outputs).unwrap(), &h200).unwrap();
    for (keys, parts) in [(600_000, 3), (300_000, 2), (100_000, 1)] {
        let (inputs, outputs) = call(keys);
        let queued = cuda::launches(&plan, &inputs, &outputs).unwrap();
        let entries: Vec<_> = queued.iter().map(|launch| launch.entry).collect();
        assert_eq!(entries, ["widen", "prefill"].repeat(parts), "{keys} keys");
    }
}
