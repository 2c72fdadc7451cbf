//! The case-file reader: it reads the files that the writer writes, and names what is wrong with
//! others.

use proptest::prelude::*;
use regard::{Attention, DType, KeyOffset, KeyPositions, Problem, QueryOffset, Values, Window};
use regard_cases::{Array, CacheSpec, Case, Granularity, KvLayout, Layout, Scales, Spec, file};

fn array(shape: &[usize]) -> Array {
    let length: usize = shape.iter().product();
    Array::new((0..length).map(|i| i as f32 * 0.25 - 1.0).collect::<Vec<_>>(), shape).unwrap()
}

fn small() -> Case {
    Case::new("small", array(&[1, 2, 2, 4]), array(&[1, 3, 1, 4]), array(&[1, 3, 1, 4]))
}

/// A safetensors file of a given header and data.
fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// A file with the small case's tensors and these options.
fn with_options(options: &str) -> Vec<u8> {
    let quoted = serde_json::to_string(options).unwrap();
    let header = format!(
        r#"{{"__metadata__":{{"attention":{quoted}}},
        "q":{{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[0,4]}},
        "k":{{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[4,8]}},
        "v":{{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[8,12]}}}}"#
    );
    raw(&header, &[0; 12])
}

fn error(bytes: &[u8]) -> String {
    match file::from_bytes("hostile", bytes) {
        Ok(case) => panic!("accepted: {case:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_case_comes_back_as_it_was() {
    let mut case = small();
    case.layout = Layout::Bhsd;
    case.kv_layout = KvLayout::Hnd;
    case.attention.scale = Some(0.1);
    case.attention.causal = true;
    case.attention.q_offset = QueryOffset::PerSequence(Array::new(vec![-3], &[1]).unwrap());
    let offset = KeyOffset::PerSequence(Array::new(vec![7], &[1]).unwrap());
    case.attention.key_positions = Some(KeyPositions { offset, stride: 5 });
    case.attention.window = Window { left: Some(7), right: None };
    case.attention.softcap = Some(30.5);
    case.attention.mask = Some(Array::new(vec![1u8, 0, 1], &[1, 3]).unwrap());
    case.attention.sinks = Some(array(&[2]));
    case.attention.block_table = Some(Array::new(vec![0], &[1, 1]).unwrap());
    case.expected_lse = Some(array(&[1, 2, 2]));
    let bytes = file::to_bytes(&case).unwrap();
    let again = file::from_bytes("small", &bytes).unwrap();
    assert_eq!(again.layout, Layout::Bhsd);
    assert_eq!(again.kv_layout, KvLayout::Hnd);
    assert_eq!(
        (again.attention.scale, again.attention.causal, again.attention.softcap),
        (Some(0.1), true, Some(30.5))
    );
    assert_eq!(again.attention.window, case.attention.window);
    let Some(KeyPositions { offset: KeyOffset::PerSequence(offsets), stride: 5 }) =
        &again.attention.key_positions
    else {
        panic!("{:?}", again.attention.key_positions)
    };
    assert_eq!(offsets.numbers().unwrap(), [7.0]);
    let QueryOffset::PerSequence(offsets) = &again.attention.q_offset else {
        panic!("{:?}", again.attention.q_offset)
    };
    assert_eq!(offsets.numbers().unwrap(), [-3.0]);
    assert_eq!(again.attention.mask.as_ref().unwrap().shape(), [1, 3]);
    assert_eq!(again.q.numbers().unwrap(), case.q.numbers().unwrap());
    assert_eq!(file::to_bytes(&again).unwrap(), bytes);
}

/// A file of one number under this name.
fn one_number(name: &str) -> Vec<u8> {
    let number = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let header = format!(r#"{{"__metadata__":{{"attention":"{{}}"}},"{name}":{number}}}"#);
    raw(&header, &[0; 4])
}

/// Rotary rows are a tensor of the file, of bytes if keys are blocks.
#[test]
fn keys_in_two_parts_come_back() {
    for format in [DType::F32, DType::E4M3, DType::Q8_0] {
        let cache = CacheSpec::new(format, Granularity::Head, Scales::Fitted);
        let spec = Spec::new("parts").heads(4, 1).two_parts(64, 32).cache(cache).legal();
        let case = spec.generate();
        let again = file::from_bytes("parts", &file::to_bytes(&case).unwrap()).unwrap();
        let (written, read) = (&case.attention.rotary_k, &again.attention.rotary_k);
        let [written, read] = [written, read].map(|rotary| rotary.as_ref().expect("two parts"));
        assert_eq!((read.dtype(), read.shape()), (format, written.shape()));
        assert_eq!(again.v.shape(), case.v.shape());
        again.inputs().unwrap();
    }
    // Without `value_dim` there are no keys in two parts.
    let rotary = Spec::new("parts").heads(4, 1).two_parts(32, 8).generate();
    let plain = Spec::new("plain").heads(4, 1).generate();
    let attention = Attention { rotary_k: rotary.attention.rotary_k, ..plain.attention.clone() };
    let case = Case { attention, ..plain };
    let again = file::from_bytes("bad", &file::to_bytes(&case).unwrap()).unwrap();
    let error = again.run(|inputs, outputs| Problem::from_operands(inputs, outputs).map(|_| ()));
    assert!(error.unwrap_err().to_string().contains("`rotary_k` is given"));
}

#[test]
fn values_in_the_keys_are_not_stored_again() {
    let case = Spec::new("latent").heads(4, 1).latent(32, 24).generate();
    let bytes = file::to_bytes(&case).unwrap();
    let again = file::from_bytes("latent", &bytes).unwrap();
    assert_eq!((again.attention.values, again.v.shape()), (Values::KeyPrefix, case.v.shape()));
    assert_eq!(again.v.numbers().unwrap(), case.v.numbers().unwrap());
    again.inputs().unwrap();
    let own = Case { v: case.v.to_contiguous().unwrap(), ..case.clone() };
    let with_values = Spec { values: Values::Separate, ..Spec::new("").heads(4, 1) };
    assert!(bytes.len() < file::to_bytes(&with_values.generate()).unwrap().len());
    own.inputs().unwrap();
    let both = error(&with_options(r#"{"value_dim": 1}"#));
    assert!(both.contains("`value_dim` is 1; allowed: no tensor v beside it"), "{both}");
    let header = |dim: usize| {
        format!(
            r#"{{"__metadata__":{{"attention":"{{\"value_dim\": {dim}}}"}},
            "q":{{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[0,4]}},
            "k":{{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[4,8]}}}}"#
        )
    };
    file::from_bytes("latent", &raw(&header(1), &[0; 8])).unwrap();
    for dim in [0, 2] {
        let wrong = error(&raw(&header(dim), &[0; 8]));
        let words = format!("`value_dim` is {dim} over k of f32 [1, 1, 1, 1]; allowed: from 1");
        assert!(wrong.contains(&words), "{wrong}");
    }
}

#[test]
fn unknown_names_are_named_with_those_that_are_known() {
    let message = error(&with_options(r#"{"casual": true}"#));
    assert!(
        message.contains("`casual` is an unknown key") && message.contains("causal"),
        "{message}"
    );
    let message = error(&one_number("query"));
    assert!(
        message.contains("`query` is an unknown tensor") && message.contains("cu_seqlens_q"),
        "{message}"
    );
}

#[test]
fn wrong_values_are_named_with_what_is_allowed() {
    for (options, argument, allowed) in [
        (r#"{"layout": "sbhd"}"#, "`layout` is \"sbhd\"", "\"bshd\" or \"bhsd\""),
        (r#"{"layout": 3}"#, "`layout` is 3", "\"bshd\""),
        (r#"{"scale": "0.125"}"#, "`scale` is \"0.125\"", "finite"),
        (r#"{"scale": 1e300}"#, "`scale` is 1e+300", "finite"),
        (r#"{"scale": 1e999}"#, "broken", "JSON"),
        (r#"{"scale": NaN}"#, "broken", "JSON"),
        (r#"{"causal": 1}"#, "`causal` is 1", "true or false"),
        (r#"{"softcap": 0}"#, "`softcap` is 0", "above 0"),
        (r#"{"softcap": -5.0}"#, "`softcap` is -5.0", "above 0"),
        (r#"{"window": [-1, 0]}"#, "`window` is -1", "null for unbounded"),
        (r#"{"window": [1]}"#, "`window` is [1]", "[left, right]"),
        (r#"{"window": 5}"#, "`window` is 5", "[left, right]"),
        (r#"{"q_offset": 1.5}"#, "`q_offset` is 1.5", "whole number"),
        (r#"{"q_offset": [0, 4294967296]}"#, "`q_offset[1]` is 4294967296", "2^31"),
        (r#"{"kv_layout": "dhn"}"#, "`kv_layout` is \"dhn\"", "\"nhd\" or \"hnd\""),
        (r#"[]"#, "`__metadata__.attention` is []", "object"),
        ("", "broken", "JSON"),
    ] {
        let message = error(&with_options(options));
        assert!(message.contains(argument) && message.contains(allowed), "{options}: {message}");
    }
    let nulls =
        r#"{"window": null, "softcap": null, "scale": null, "q_offset": null, "causal": false}"#;
    assert!(file::from_bytes("nulls", &with_options(nulls)).is_ok());
}

#[test]
fn broken_files_are_errors() {
    let good = file::to_bytes(&small()).unwrap();
    for length in 0..good.len() {
        assert!(file::from_bytes("truncated", &good[..length]).is_err(), "{length} bytes");
    }
    let mut longer = good.clone();
    longer.push(0);
    assert!(file::from_bytes("longer", &longer).is_err());

    // A header that claims to be huge.
    for claim in [u64::MAX, 1 << 40, 99_999_999] {
        let mut bytes = claim.to_le_bytes().to_vec();
        bytes.extend(b"{}");
        assert!(error(&bytes).contains("broken"));
    }
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        format!(
            r#"{{"__metadata__":{{"attention":"{{}}"}},
            "q":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}},
            "k":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}},
            "v":{{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}}}"#
        )
    };
    for (dtype, shape, offsets) in [
        ("F32", "[1]", "[2,6]"),                                // overlapping
        ("F32", "[1]", "[8,4]"),                                // backwards
        ("F32", "[1]", "[8,12]"),                               // past the end
        ("F32", "[4294967296,4294967296,4294967296]", "[8,8]"), // overflowing
        ("F32", "[0,1152921504606846976,64]", "[8,8]"),         // empty, and claiming much
        ("F32", "[0,1073741824]", "[8,8]"),                     // the same, without overflow
        ("F32", "[-1]", "[8,8]"),                               // negative
        ("F32", "[1,1,1,1,1,0]", "[8,8]"),                      // too many dimensions
        ("F64", "[0]", "[8,8]"),                                // not a type for q
        ("X32", "[0]", "[8,8]"),                                // not a type
    ] {
        error(&raw(&tensor(dtype, shape, offsets), &[0; 8]));
    }
    let deep = format!(r#"{{"window": {}}}"#, "[".repeat(100_000));
    assert!(error(&with_options(&deep)).contains("broken"));
}

#[test]
fn missing_parts_are_named() {
    assert!(error(&one_number("q")).contains("`k` is missing"));
    let empty = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
    let header = format!(r#"{{"q":{empty},"k":{empty},"v":{empty}}}"#);
    assert!(error(&raw(&header, &[])).contains("`__metadata__.attention` is missing"));
    let message = file::read("no-such-file.safetensors").unwrap_err().to_string();
    assert!(message.contains("no-such-file.safetensors"), "{message}");
}

#[test]
fn options_that_need_others_say_so() {
    let mut case = small();
    case.kv_layout = KvLayout::Hnd;
    assert!(case.inputs().unwrap_err().to_string().contains("kv_layout"));
    // An empty v of any head dim must not decide how much is allocated.
    let mut case = small();
    case.v = array(&[1, 0, 1, 1 << 24]);
    assert!(case.run(|_, _| Ok(())).unwrap_err().to_string().contains("`v` is of shape"));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 4000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn changed_bytes_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut case = small();
        case.attention.q_offset = QueryOffset::Same(-1);
        case.attention.window = Window { left: Some(7), right: None };
        let mut bytes = file::to_bytes(&case).unwrap();
        for (index, byte) in changes {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        if let Ok(case) = file::from_bytes("changed", &bytes) {
            let _ = case.run(|inputs, outputs| {
                regard::Problem::from_operands(inputs, outputs).map(|_| ())
            });
        }
    }
}
