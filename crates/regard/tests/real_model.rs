//! Queries, keys and values of a real model, against the results of another program: see
//! `testdata/README.md`.

mod support;

use regard_cases::check::Checker;
use regard_cases::file;
use std::path::Path;

#[test]
fn a_real_models_attention_is_right_on_every_level() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    let mut checked = 0;
    for entry in std::fs::read_dir(&directory).expect("testdata is in the repository") {
        let path = entry.expect("a readable directory").path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let case = file::read(&path).unwrap();
        assert!(case.expected_out.is_some(), "{} brings no expected output", case.name);
        let checker =
            Checker::new(&case, None).unwrap_or_else(|failure| panic!("{}: {failure}", case.name));
        for machine in support::machines() {
            let verdict = checker.check(&support::run(&case, &machine));
            let verdict =
                verdict.unwrap_or_else(|failure| panic!("{} on {machine}: {failure}", case.name));
            let peer = verdict.expected.expect("the file brings one");
            println!(
                "{} on {machine}: off by {:.1e}, {:.2} of what is allowed (the file itself: \
                 {:.1e}, {:.2})",
                case.name,
                verdict.agreement.out_error,
                verdict.agreement.worst,
                peer.out_error,
                peer.worst
            );
        }
        checked += 1;
    }
    assert_eq!(checked, 4);
}

#[test]
fn a_wrong_expectation_is_told_apart_from_a_wrong_result() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/smollm2-135m-layer14-decode.safetensors");
    let mut case = file::read(path).unwrap();
    // The file's answer is to full attention over 513 keys; without the last it is another.
    case.attention.kv_lens = Some(regard_cases::Array::new(vec![512], &[1]).unwrap());
    let failure = Checker::new(&case, None).unwrap_err().to_string();
    assert!(
        failure.starts_with("the expected tensors in the file disagree with the oracle: out of"),
        "{failure}"
    );
}
