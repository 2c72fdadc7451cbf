//! Keys in two parts: latent rows and rotary rows in tensors of their own give the results of one
//! tensor, and parts that do not fit together are refused.

mod expect;
mod support;

use expect::expect;
use regard::{Attention, DType, Error, Inputs, Machine, Outputs, Plan, Tensor, TensorMut, Values};
use regard_cases::check::Checker;
use regard_cases::rows::{bits, difference, rows};
use regard_cases::{Keys, Spec, list};

/// Every case on every level: against the oracle, and with ordinary numbers in keys that no row
/// sees.
#[test]
fn every_case_on_every_level() {
    let specs: Vec<_> = list::two_parts().collect();
    let all_have_two = specs.iter().all(|spec| spec.rotary_dim > 0);
    assert!(specs.len() > 100 && all_have_two, "{} cases", specs.len());
    let machines = support::machines();
    support::for_all(&specs, |spec| {
        let case = spec.generate();
        let clean = Spec { poison: false, ..spec.clone() }.generate();
        let checker = Checker::new(&case, None).map_err(|failure| failure.to_string())?;
        for machine in &machines {
            let failed = |what: String| format!("{} on {machine}: {what}", spec.name);
            let found = case.run(support::on(machine)).map_err(|e| failed(e.to_string()))?;
            checker.check(&found).map_err(|failure| failed(failure.to_string()))?;
            if bits(&found) != bits(&support::run(&clean, machine)) {
                return Err(failed("depends on keys that no row sees".to_string()));
            }
        }
        Ok(())
    });
}

/// In batch-invariant mode the bits are the same as with keys in one tensor.
#[test]
fn two_parts_have_the_bits_of_one() {
    let storage = [
        Keys::Batched { slack: 3 },
        Keys::Ragged { slack: 0 },
        Keys::Paged { block_size: 16, interleaved: false },
    ];
    for (i, machine) in support::machines().into_iter().enumerate() {
        for (j, dtype) in [DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
            for (k, lengths) in [vec![(1, 2300), (1, 130)], vec![(5, 5), (5, 300)], vec![(80, 90)]]
                .into_iter()
                .enumerate()
            {
                let heads = [(6, 2), (40, 2), (16, 1)][(i + j + k) % 3];
                let two = Spec { keys: storage[(i + j) % 3], ..Spec::invariant() }
                    .dtype(dtype)
                    .lengths(&lengths)
                    .heads(heads.0, heads.1)
                    .two_parts(64, 32)
                    .legal();
                let one = Spec { rotary_dim: 0, ..two.clone() };
                assert_eq!(two.rotary_dim, 32);
                let of = |spec: &Spec| {
                    let case = spec.generate();
                    rows(spec, &case, &support::run(&case, &machine))
                };
                if let Some(difference) = difference(&of(&two), &of(&one)) {
                    panic!("{machine}, {dtype}, {heads:?}, {lengths:?}: {difference}");
                }
            }
        }
    }
}

/// The result of running these inputs, with outputs `[1, 1, 4, 16]`.
fn run(inputs: &Inputs) -> Result<(), Error> {
    let mut out = vec![0f32; 4 * 16];
    let out = TensorMut::new(&mut out, [1, 1, 4, 16])?;
    let mut outputs = Outputs { out, lse: None };
    let plan = Plan::for_operands(inputs, &outputs)?;
    plan.run(inputs, &mut outputs, &mut vec![0; plan.workspace_bytes()])
}

#[test]
fn parts_that_do_not_fit_are_errors_that_name_the_argument() {
    let (queries, rows) = (vec![0.5f32; 4 * 24], vec![0.25f32; 40 * 24]);
    let halves = vec![regard::f16::ONE; 20 * 8];
    let q = Tensor::new(&queries, [1, 1, 4, 24]).unwrap();
    let k = Tensor::new(&rows[..20 * 16], [1, 20, 1, 16]).unwrap();
    let rotary = Tensor::new(&rows[20 * 24..20 * 32], [1, 20, 1, 8]).unwrap();
    let said = |rotary_k| Attention { rotary_k, values: Values::KeyPrefix, ..Attention::causal() };
    let with = |rotary_k| run(&Inputs::new(q, k, k, said(Some(rotary_k))));
    let refused = |found: Result<(), Error>, name, what, allowed| {
        expect(found.expect_err("this must not run"), name, what, allowed)
    };

    with(rotary).unwrap();
    let separate = Attention { values: Values::Separate, ..said(Some(rotary)) };
    run(&Inputs::latent(q, k, 16, separate).unwrap()).unwrap();
    let shape = |shape| Tensor::new(&rows[..160], shape).unwrap();
    refused(run(&Inputs::new(q, k, k, said(None))), "k", "of head dim 16", "24, as q has");
    refused(with(shape([1, 10, 1, 16])), "rotary_k", "[1, 10, 1]", "as k has, but for the last");
    refused(
        with(Tensor::new(&rows[..240], [1, 20, 1, 12]).unwrap()),
        "k",
        "of head dim 16 beside 12 of rotary_k",
        "24, as q has, in both together",
    );
    let three = Tensor::new(&rows[..160], [20, 1, 8]).unwrap();
    refused(with(three), "rotary_k", "[20, 1, 8]", "as k has");
    let other_type = Tensor::new(&halves, [1, 20, 1, 8]).unwrap();
    refused(with(other_type), "rotary_k", "f16", "f32");
    let spread = Tensor::with_strides(&rows[..], [1, 20, 1, 8], [320, 16, 16, 2]).unwrap();
    refused(with(spread), "rotary_k", "stride", "1");
    let empty = Tensor::new(&rows[..0], [1, 20, 1, 0]).unwrap();
    refused(with(empty), "rotary_k", "[1, 20, 1, 0]", "a rotary dim of 1 or more");
    let separate = Attention { values: Values::Separate, ..said(Some(rotary)) };
    refused(
        run(&Inputs::new(q, k, k, separate)),
        "rotary_k",
        "given",
        "given together with values that are a prefix of the keys only",
    );
    // Values are all of `k`.
    let fewer = Inputs::new(q, k, k.prefix(8).unwrap(), said(Some(rotary)));
    refused(run(&fewer), "value_dim", "8", "16, all dims of `k`");
    // A second cache has keys in one part.
    let pool = |from: usize, dim: usize| {
        Tensor::new(&rows[from..from + 20 * dim], [5, 4, 1, dim]).unwrap()
    };
    let list = [0, 3];
    let list = Tensor::new(&list, [1, 1, 2]).unwrap();
    let second = Attention {
        causal: false,
        key_indices: Some(list),
        indices_are_slots: true,
        second_k: Some(pool(0, 24)),
        second_indices: Some(list),
        ..said(Some(pool(0, 8)))
    };
    let beside = Inputs::new(q, pool(160, 16), pool(160, 16), second);
    refused(run(&beside), "second_k", "given", "none beside rotary_k");
}

#[test]
fn plans_are_for_two_parts_or_for_one() {
    let spec = Spec::new("planned").two_parts(64, 32).dtype(DType::BF16).legal();
    let machine = Machine::host().unwrap();
    let plan = Plan::new(&spec.problem(true), &machine).unwrap();
    assert!(plan.explain().contains("32 rotary dims in a tensor of their own"));
    let one = Spec { rotary_dim: 0, ..spec.clone() };
    let error = one
        .generate()
        .run(|inputs, outputs| plan.run(inputs, outputs, &mut vec![0; plan.workspace_bytes()]));
    expect(error.expect_err("planned for two parts"), "rotary_dim", "0", "32, as planned");
    // Problems that no operands pose.
    let problem = spec.problem(true);
    let wider = regard::Problem { rotary_dim: 96, ..problem.clone() };
    expect(Plan::new(&wider, &machine).unwrap_err(), "rotary_dim", "96", "0..=95");
    let separate = regard::Problem { values: Values::Separate, ..problem.clone() };
    let allowed = "0, unless values are a prefix of the keys";
    expect(Plan::new(&separate, &machine).unwrap_err(), "rotary_dim", "32", allowed);
    for name in ["h200", "a100", "m3-max"] {
        let plan = Plan::new(&problem, &name.parse().unwrap()).unwrap();
        assert!(plan.explain().contains("32 rotary dims in a tensor of their own"));
    }
}
