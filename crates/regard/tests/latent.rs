//! Values that are a prefix of the keys: the same results as a copy of them, and refusals.

mod expect;
mod support;

use expect::expect;
use regard::format::Mla656;
use regard::{
    Attention, DType, Error, Inputs, Kernel, KvStorage, Machine, Outputs, Plan, Problem, Tensor,
    TensorMut, Values,
};
use regard_cases::check::Checker;
use regard_cases::{Case, Output, Spec, list};

/// The same case with values in a tensor of their own.
fn with_own_values(case: &Case) -> Case {
    let mut own = case.clone();
    own.attention.values = Values::Separate;
    own.attention.v_scales = case.attention.k_scales.clone();
    own.v = case.v.to_contiguous().expect("a view of the keys");
    own.attention.second_v = case.attention.second_k.as_ref().map(|keys| {
        let values = keys.prefix(case.value_dim()).and_then(|values| values.to_contiguous());
        values.expect("a view of the keys")
    });
    own.attention.second_v_scales = case.attention.second_k_scales.clone();
    own
}

/// Runs a case; also returns the kernel that its plan chose.
fn run_case(case: &Case, machine: &Machine) -> Result<(Output, Kernel), Error> {
    let mut kernel = None;
    let output = case.run(|inputs, outputs| {
        let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, machine)?;
        kernel = Some(plan.choice().kernel);
        plan.run(inputs, outputs, &mut vec![0xff; plan.workspace_bytes()])
    })?;
    Ok((output, kernel.expect("a case that ran has a plan")))
}

/// Every latent case on every level, against the oracle and against a copy of its values: to the
/// bit, because the same numbers are added in the same order. (Pairs of bf16 are multiplied over
/// blocks only if values are apart from keys. Where few rows stream, the order depends on that of
/// heads and tokens in memory, which a copy without gaps may change.)
#[test]
fn a_copy_of_the_values_gives_the_same_bits() {
    // Rows of mla656 have no copy, and neither have keys in two parts.
    let is_latent = |spec: &Spec| {
        spec.values == Values::KeyPrefix
            && spec.rotary_dim == 0
            && !spec.key_dtype().is_latent_row()
    };
    let specs: Vec<_> = list::list_with_caches().filter(is_latent).collect();
    assert!(specs.len() > 100, "{} latent cases", specs.len());
    let machines = support::machines();
    support::for_all(&specs, |spec| {
        let case = spec.generate();
        let own = with_own_values(&case);
        let checker = Checker::new(&case, None).map_err(|failure| failure.to_string())?;
        for machine in &machines {
            let failed = |what: String| format!("{} on {machine}: {what}", spec.name);
            let (latent, latent_kernel) =
                run_case(&case, machine).map_err(|e| failed(e.to_string()))?;
            checker.check(&latent).map_err(|failure| failed(failure.to_string()))?;
            if spec.memory.k.order != [0, 1, 2] {
                continue;
            }
            let (copied, kernel) = run_case(&own, machine).map_err(|e| failed(e.to_string()))?;
            checker.check(&copied).map_err(|failure| failed(failure.to_string()))?;
            if kernel == Kernel::CpuBf16 && latent_kernel != kernel {
                continue;
            }
            for (name, a, b) in
                [("out", &latent.out, &copied.out), ("lse", &latent.lse, &copied.lse)]
            {
                if a.data().to_le_bytes() != b.data().to_le_bytes() {
                    return Err(failed(format!("{name} differs from that over a copy")));
                }
            }
        }
        Ok(())
    });
}

/// The result of running these inputs, with outputs `[1, 1, 4, value_dim]`.
fn run(inputs: &Inputs, value_dim: usize) -> Result<(), Error> {
    let mut out = vec![0f32; 4 * value_dim];
    let out = TensorMut::new(&mut out, [1, 1, 4, value_dim])?;
    let mut outputs = Outputs { out, lse: None };
    let plan = Plan::for_operands(inputs, &outputs)?;
    plan.run(inputs, &mut outputs, &mut vec![0; plan.workspace_bytes()])
}

#[test]
fn values_that_are_no_prefix_of_the_keys() {
    let (queries, cache) = (vec![0.5f32; 4 * 16], vec![0.25f32; 40 * 16]);
    let q = Tensor::new(&queries, [1, 1, 4, 16]).unwrap();
    let k = Tensor::new(&cache[..20 * 16], [1, 20, 1, 16]).unwrap();
    let attention = || Attention { values: Values::KeyPrefix, ..Attention::causal() };
    let with = |v| Inputs::new(q, k, v, attention());

    run(&with(k.prefix(8).unwrap()), 8).unwrap();
    run(&with(k), 16).unwrap();
    run(&Inputs::latent(q, k, 8, Attention::causal()).unwrap(), 8).unwrap();

    let allowed = "the first dims of `k` in its memory (f32[1, 20, 1, 16] with strides";
    let elsewhere = Tensor::new(&cache[20 * 16..], [1, 20, 1, 16]).unwrap();
    expect(run(&with(elsewhere), 16).unwrap_err(), "v", "in other memory", allowed);
    let later = Tensor::with_strides(&cache[8..], [1, 20, 1, 8], [320, 16, 16, 1]).unwrap();
    expect(run(&with(later), 8).unwrap_err(), "v", "in other memory", allowed);
    let packed = Tensor::with_strides(&cache, [1, 20, 1, 8], [160, 8, 8, 1]).unwrap();
    expect(run(&with(packed), 8).unwrap_err(), "v", "strides [160, 8, 8, 1]", allowed);
    let shorter = Tensor::with_strides(&cache, [1, 19, 1, 8], [320, 16, 16, 1]).unwrap();
    expect(run(&with(shorter), 8).unwrap_err(), "v", "[1, 19, 1]", "[1, 20, 1]");
    let wider = Tensor::with_strides(&cache, [1, 20, 1, 24], [320, 16, 16, 1]).unwrap();
    expect(run(&with(wider), 24).unwrap_err(), "v", "f32[1, 20, 1, 24]", allowed);
    let halves = vec![regard::f16::ONE; 40 * 16];
    let other_type = Tensor::with_strides(&halves, [1, 20, 1, 8], [320, 16, 16, 1]).unwrap();
    expect(run(&with(other_type), 8).unwrap_err(), "v", "f16[1, 20, 1, 8]", allowed);

    let long = Inputs::latent(q, k, 17, Attention::causal()).map(|_| ());
    expect(
        long.unwrap_err(),
        "value_dim",
        "17 over keys f32[1, 20, 1, 16]",
        "at most the head dim",
    );
    let none = Inputs::latent(q, k, 0, Attention::causal()).map(|_| ());
    expect(none.unwrap_err(), "value_dim", "0 over keys f32[1, 20, 1, 16]", "1 or more");
    expect(k.prefix(17).unwrap_err(), "prefix", "17 values of f32[1, 20, 1, 16]", "0..=16");
}

#[test]
fn scales_of_values_are_those_of_keys() {
    let (queries, codes) = (vec![0.5f32; 4 * 16], vec![3i8; 20 * 16]);
    let scales = [0.5f32, 0.5];
    let q = Tensor::new(&queries, [1, 1, 4, 16]).unwrap();
    let k = Tensor::new(&codes, [1, 20, 1, 16]).unwrap();
    let scale = |i: usize| Tensor::new(&scales[i..=i], [1, 1, 1]).unwrap();
    let run_with = |k_scales, v_scales| {
        let attention = Attention { k_scales, v_scales, ..Attention::causal() };
        run(&Inputs::latent(q, k, 8, attention).unwrap(), 8)
    };
    run_with(Some(scale(0)), None).unwrap();
    run_with(Some(scale(0)), Some(scale(0))).unwrap();
    let other = run_with(Some(scale(0)), Some(scale(1))).unwrap_err();
    expect(other, "v_scales", "given", "none, or the view that k_scales is");
    expect(run_with(None, None).unwrap_err(), "k_scales", "missing", "`k` is i8");
    let swapped = run_with(None, Some(scale(0))).unwrap_err();
    expect(swapped, "v_scales", "given", "none, or the view that k_scales is");
}

#[test]
fn plans_say_where_values_are() {
    let machine = Machine::host().unwrap();
    let latent = Problem {
        query_heads: 16,
        kv_len: 4096,
        value_dim: 512,
        keys: KvStorage::Paged { block_size: 64 },
        values: Values::KeyPrefix,
        ..Problem::new(DType::BF16, 576)
    };
    let plan = Plan::new(&latent, &machine).unwrap();
    assert!(plan.explain().contains("values a prefix of the keys"), "{}", plan.explain());
    let separate = Problem { values: Values::Separate, ..latent.clone() };
    let error = latent.covers(&separate).unwrap_err();
    expect(error, "values", "Separate", "KeyPrefix, as planned");
    let wide = Problem { value_dim: 576, head_dim: 512, ..latent.clone() };
    expect(Plan::new(&wide, &machine).unwrap_err(), "value_dim", "576", "1..=512");
    let mixed = Problem { value_dtype: DType::F16, ..latent };
    expect(Plan::new(&mixed, &machine).unwrap_err(), "value_dtype", "f16", "bf16");
}

#[test]
fn rows_of_656_bytes_are_keys_with_a_prefix() {
    let (queries, rows) = (vec![0.5f32; 4 * 576], vec![Mla656::from_f32(&[0.25; 576]); 40]);
    let q = Tensor::new(&queries, [1, 1, 4, 576]).unwrap();
    let k = Tensor::new(&rows[..20], [1, 20, 1, 1]).unwrap();
    for value_dim in [512, 576] {
        run(&Inputs::latent(q, k, value_dim, Attention::causal()).unwrap(), value_dim).unwrap();
    }
    let v = k.prefix(512).unwrap();
    assert_eq!((v.dtype(), v.shape()), (DType::Mla656Latent, k.shape()));
    let said = Attention { values: Values::KeyPrefix, ..Attention::causal() };

    expect(k.prefix(500).unwrap_err(), "prefix", "500 values of mla656", "512 or 576");
    let cut = Inputs::latent(q, k, 448, Attention::causal()).map(|_| ());
    expect(cut.unwrap_err(), "value_dim", "448 over keys mla656[1, 20, 1, 1]", "whole blocks");
    let elsewhere = Tensor::new(&rows[20..], [1, 20, 1, 1]).unwrap().prefix(512).unwrap();
    let other = Inputs::new(q, k, elsewhere, said);
    expect(run(&other, 512).unwrap_err(), "v", "in other memory", "the first dims of `k`");
    let allowed = "whose prefix the values are";
    let separate = Inputs::new(q, k, v, Attention::causal());
    expect(run(&separate, 512).unwrap_err(), "key_dtype", "mla656 with values Separate", allowed);
    let keys = Tensor::new(&queries, [1, 4, 1, 576]).unwrap();
    let of_floats = Inputs::new(q, keys, v, Attention::causal());
    assert!(run(&of_floats, 512).is_err());
    let values = Problem { value_dtype: DType::Mla656, kv_len: 9, ..Problem::new(DType::F32, 576) };
    expect(values.validate().unwrap_err(), "value_dtype", "mla656 with values Separate", allowed);
    let scales = Tensor::new(&[1f32], [1, 1, 1]).unwrap();
    let scaled = Attention { k_scales: Some(scales), ..Attention::causal() };
    let scaled = Inputs::latent(q, k, 512, scaled).unwrap();
    expect(run(&scaled, 512).unwrap_err(), "k_scales", "given", "none: `k` is mla656");
}
