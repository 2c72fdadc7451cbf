//! The command, run as its users run it: results, exit statuses, and messages about bad input.

mod support;

use regard::DType;
use regard_cases::{Array, Case, Keys, Layout, Spec, file};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use support::{Ran, command, directory, regard, text};

fn spec(name: &str) -> Spec {
    Spec { causal: true, ..Spec::new(name).lengths(&[(5, 70), (5, 33)]).heads(4, 2).dims(32, 16) }
}

/// Writes a case into a directory.
fn write(case: &Case, directory: &Path) -> PathBuf {
    let path = directory.join(format!("{}.safetensors", case.name));
    file::write(case, &path).expect("a case file");
    path
}

/// Writes a good case into a directory.
fn write_good(name: &str, directory: &Path) -> PathBuf {
    write(&spec(name).generate(), directory)
}

/// A number of threads that no system grants is not asked for: as many as there are cores are.
#[test]
fn more_threads_than_any_system_grants() {
    let case = Spec::new("threads").generate();
    let path = directory("threads").join("threads.safetensors");
    file::write(&case, &path).expect("a file");
    let begun = std::time::Instant::now();
    for number in ["1000000000000", "99999999999999999999999", "0"] {
        for arguments in [&["info", "--json"][..], &["check", text(&path)]] {
            let output =
                command(arguments).env("RAYON_NUM_THREADS", number).output().expect("it runs");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn info_says_what_is_here() {
    let shown = regard(&["info"]).done();
    for label in ["regard ", "cpu ", "simd ", "threads ", "caches ", "gpu ", "backends  cpu"] {
        assert!(shown.contains(label), "{shown}");
    }
    let run: Ran =
        command(&["info", "--json"]).env("REGARD_SIMD", "scalar").output().expect("starts").into();
    let info = run.json();
    assert_eq!(info["simd"], "scalar");
    assert_eq!(info["simd_override"], "scalar");
    assert_eq!(info["backends"][0], "cpu");
    // Either there is a GPU, or the reason why not.
    assert_eq!(info["gpus"].as_array().unwrap().is_empty(), info["no_gpu"].is_string());
    assert!(info["threads"].as_u64().is_some_and(|threads| threads > 0));
    assert!(
        info["simd_available"].as_array().is_some_and(|levels| levels.contains(&"scalar".into()))
    );
    let run: Ran =
        command(&["info", "--json"]).env_remove("REGARD_SIMD").output().expect("starts").into();
    assert_eq!(run.json()["simd_override"], Value::Null);

    let unknown: Ran =
        command(&["info"]).env("REGARD_SIMD", "sse9").output().expect("starts").into();
    unknown.failed(2, &["`REGARD_SIMD` is \"sse9\"", "scalar, avx2, avx512 or neon"]);
    let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
    let absent: Ran =
        command(&["info"]).env("REGARD_SIMD", foreign).output().expect("starts").into();
    absent.failed(3, &[&format!("REGARD_SIMD={foreign} asks for instructions that it lacks")]);
}

#[test]
fn plan_answers_for_machines_here_and_elsewhere() {
    let shape = "b=1 hq=32 hkv=8 d=128 lq=1 lk=4096 dtype=bf16 causal window=512,0 softcap alibi \
                 sinks mask=bool page=16 lse";
    let shown = regard(&["plan", "--shape", shape]).done();
    assert!(shown.contains("kernel     cpu_") && shown.contains("split "), "{shown}");

    let plan =
        regard(&["plan", "--shape", shape, "--machine", "avx2", "--threads", "16", "--json"]);
    let plan = plan.json();
    assert_eq!(plan["kernel"], "cpu_avx2");
    assert_eq!(plan["machine"]["threads"], 16);
    assert_eq!(plan["problem"]["block_size"], 16);
    assert_eq!(plan["problem"]["window"], serde_json::json!([512, 0]));
    assert!(plan["workspace_bytes"].as_u64().is_some() && plan["tile"]["rows"].as_u64().is_some());

    let stored = format!("{shape} k=i8 v=q4_0 scale=page-head");
    let plan = regard(&["plan", "--shape", &stored, "--json"]).json();
    let problem = &plan["problem"];
    assert_eq!([&problem["key_dtype"], &problem["value_dtype"]], ["i8", "q4_0"]);
    let shown = regard(&["plan", "--shape", &stored]).done();
    assert!(shown.contains("bf16 over i8/q4_0"), "{shown}");
    regard(&["plan", "--shape", "hq=4 d=40 lq=1 kv=q8_0"]).failed(2, &["multiple of 32"]);

    let rows = "hq=16 hkv=1 d=576 dv=512 lq=1 lk=4096 dtype=bf16 latent kv=mla656";
    let plan = regard(&["plan", "--shape", rows, "--machine", "h200", "--json"]).json();
    assert_eq!(plan["problem"]["value_dtype"], "mla656_latent");
    let separate = "hq=16 hkv=1 d=576 lq=1 kv=mla656";
    regard(&["plan", "--shape", separate]).failed(2, &["key_dtype", "whose prefix"]);

    let endless = "hq=1 d=64 lq=1 lk=2147483647 dtype=bf16";
    let refusal = regard(&["plan", "--shape", endless, "--machine", "h200"]);
    refusal.failed(3, &["cannot run on h200", "CUDA kernels take up to"]);
    assert_eq!(refusal.stdout, "");
    let refusal = regard(&["plan", "--shape", endless, "--machine", "h200", "--json"]);
    refusal.failed(3, &["h200"]);
    assert!(refusal.json()["refused"].as_str().is_some_and(|reason| reason.contains("CUDA")));
    // A GPU that is not here is planned for all the same.
    for machine in ["h200", "a100", "m2"] {
        let plan = regard(&["plan", "--shape", shape, "--machine", machine, "--json"]).json();
        assert!(
            plan["kernel"].as_str().is_some_and(|kernel| kernel.starts_with("decode_")),
            "{plan}"
        );
    }
}

#[test]
fn plan_explains_each_kind_of_layer_of_a_model() {
    let arguments = ["plan", "--model", "llama-4-scout,deepseek-v3", "--machine", "h200"];
    let shown = regard(&arguments).done();
    for heading in [
        "llama-4-scout decode-b8 chunked: 36 of 48 layers (meta-llama/Llama-4-Scout-17B-16E)",
        "llama-4-scout decode-b8 global: 12 of 48 layers",
        "deepseek-v3 prefill-2k mla: 61 of 61 layers",
        "chunk=8192",
    ] {
        assert!(shown.contains(heading), "{heading}: {shown}");
    }
    let plans = regard(&[&arguments[..], &["--workload", "mixed", "--json"]].concat()).json();
    let kinds: Vec<_> =
        plans.as_array().unwrap().iter().map(|plan| (&plan["kind"], &plan["layers"])).collect();
    let expected = [("chunked", 36), ("global", 12), ("mla", 61)]
        .map(|(kind, layers)| (Value::from(kind), Value::from(layers)));
    assert_eq!(kinds, expected.each_ref().map(|(kind, layers)| (kind, layers)));
    assert_eq!(plans[0]["problem"]["ragged_query_rows"], 4 * 2048 + 60);
    regard(&["plan", "--model", "llama-9"]).failed(2, &["`model` is", "gemma-3-27b"]);
}

#[test]
fn plan_takes_a_case_file() {
    let directory = directory("plan-file");
    let path = write_good("some", &directory);
    let plan = regard(&["plan", text(&path), "--machine", "scalar", "--json"]).json();
    assert_eq!(plan["kernel"], "cpu_scalar");
    assert_eq!(plan["problem"]["batch"], 2);
    assert_eq!(plan["problem"]["query_len"], 5);
    assert_eq!(plan["problem"]["value_dim"], 16);
    assert_eq!(plan["problem"]["causal"], true);
    let missing = directory.join("none.safetensors");
    regard(&["plan", text(&missing)])
        .failed(1, &["none.safetensors", "`file` is unreadable", "a case file"]);
}

#[test]
fn plan_names_what_it_does_not_understand() {
    let shape = "hq=4 d=64 lq=7";
    let machine = regard(&["plan", "--shape", shape, "--machine", "h100x"]);
    machine
        .failed(2, &["`machine` is \"h100x\"", "host, scalar, neon, avx2, avx512, h200, a100, m1"]);
    let key = regard(&["plan", "--shape", "hq=4 d=64 lq=7 heads=3"]);
    key.failed(2, &["`shape key` is \"heads\"", "b, hq, hkv, d, dv"]);
    let value = regard(&["plan", "--shape", "hq=4 hkv=3 d=64 lq=7"]);
    value.failed(2, &["`query_heads` is 4 with 3 key/value heads", "a multiple"]);
    let threads = regard(&["plan", "--shape", shape, "--machine", "h200", "--threads", "4"]);
    threads.failed(2, &["`threads` is 4 with machine h200", "a CPU's"]);
    for arguments in [
        &["plan"][..],
        &["plan", "x", "--shape", shape],
        &["plan", "--shape", shape, "--threads", "0"],
    ] {
        let ran = regard(arguments);
        assert_eq!(ran.status, 2);
        assert!(ran.stderr.starts_with("error: "), "{}", ran.stderr);
    }
}

/// The tensors of a result file: name, type, shape and bytes.
fn tensors(path: &Path) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(path).expect("a result file");
    let mut tensors: Vec<_> = SafeTensors::deserialize(&bytes)
        .expect("a safetensors file")
        .iter()
        .map(|(name, view)| {
            (name.to_string(), view.dtype(), view.shape().to_vec(), view.data().to_vec())
        })
        .collect();
    tensors.sort();
    tensors
}

#[test]
fn run_writes_what_the_library_computes() {
    let input = directory("run-in");
    let out = directory("run-out");
    std::fs::create_dir(input.join("below")).expect("a directory");
    let cases = [
        spec("plain").generate(),
        Spec { layout: Layout::Bhsd, ..spec("bhsd") }.dtype(DType::F16).generate(),
        Spec { keys: Keys::Ragged { slack: 0 }, ragged_queries: true, ..spec("ragged") }
            .legal()
            .dtype(DType::BF16)
            .generate(),
        Spec { out_dtype: DType::F32, ..spec("below/widened").dtype(DType::BF16) }.generate(),
    ];
    let mut cases: Vec<_> = cases.into_iter().collect();
    // A file asks for an f32 output with an expected one.
    let widened = cases.last_mut().expect("four cases");
    let shape = [2, 5, 4, 16];
    widened.expected_out =
        Some(Array::new(vec![0.0f32; 2 * 5 * 4 * 16], &shape).expect("contiguous"));
    for case in &cases {
        write(case, &input);
    }
    let ran = regard(&["run", text(&input), "--out", text(&out), "--json"]);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    let report = ran.json();
    assert_eq!((&report["written"], &report["failed"]), (&4.into(), &0.into()));
    assert_eq!(report["files"].as_array().map(Vec::len), Some(4));
    assert!(report["files"][0]["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0));

    for case in &cases {
        let path = out.join(format!("{}.safetensors", case.name));
        // Files as small as these run on one thread.
        let machine = regard::Machine::host().expect("this machine").with_threads(1);
        let output = case.run(|inputs, outputs| {
            let plan =
                regard::Plan::new(&regard::Problem::from_operands(inputs, outputs)?, &machine)?;
            plan.run(inputs, outputs, &mut vec![0; plan.workspace_bytes()])
        });
        let output = output.expect("a sound case");
        let dtype = |dtype| match dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            _ => Dtype::BF16,
        };
        let expected = [("lse", &output.lse), ("out", &output.out)].map(|(name, array)| {
            (
                name.to_string(),
                dtype(array.dtype()),
                array.shape().to_vec(),
                array.data().to_le_bytes(),
            )
        });
        assert_eq!(tensors(&path), expected, "{}", case.name);
    }
    let again = regard(&["run", text(&input), "--out", text(&out), "--threads", "2"]);
    assert_eq!(again.done(), "4 written, 0 failed\n");
}

#[test]
fn run_results_pass_as_expected_tensors() {
    let directory = directory("run-expected");
    let mut case = spec("some").generate();
    let path = write(&case, &directory);
    let out = directory.join("out");
    regard(&["run", text(&path), "--out", text(&out)]).done();
    for (name, _, shape, bytes) in tensors(&out.join("some.safetensors")) {
        let floats: Vec<f32> = bytes
            .chunks_exact(4)
            .map(|x| f32::from_le_bytes(x.try_into().expect("4 bytes")))
            .collect();
        let array = Some(Array::new(floats, &shape).expect("contiguous"));
        if name == "out" {
            case.expected_out = array;
        } else {
            case.expected_lse = array;
        }
    }
    write(&case, &directory);
    let report = regard(&["check", text(&path), "--json"]).json();
    assert_eq!(report["passed"], 1);
    assert!(report["cases"][0]["expected"]["out_error"].as_f64().is_some());
}

#[test]
fn run_overwrites_no_input() {
    let directory = directory("run-overwrite");
    let path = write_good("some", &directory);
    let before = std::fs::read(&path).expect("readable");
    let ran = regard(&["run", text(&path), "--out", text(&directory)]);
    ran.failed(2, &["`--out` is", "some.safetensors is an input", "no input is overwritten"]);
    let roundabout = directory.join("x/..");
    std::fs::create_dir(directory.join("x")).expect("a directory");
    regard(&["run", text(&directory), "--out", text(&roundabout)]).failed(2, &["`--out` is"]);
    assert_eq!(std::fs::read(&path).expect("readable"), before);

    let other = directory.join("x");
    let twin = write_good("some", &other);
    let out = directory.join("out");
    let ran = regard(&["run", text(&path), text(&twin), "--out", text(&out)]);
    ran.failed(2, &["of the same name as", "a result file for each input"]);
    assert!(!out.exists());
}

/// Writes files that are no cases: the name of each, and a part of the message about it.
fn write_bad(directory: &Path) -> Vec<(&'static str, &'static str)> {
    let good = file::to_bytes(&spec("good").generate()).expect("bytes");
    let safetensors = |header: &str, data: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    };
    let tensor = |name: &str, shape: &str, bytes: usize| {
        let number = format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[0,{bytes}]}}"#);
        format!(r#"{{"__metadata__":{{"attention":"{{}}"}},"{name}":{number}}}"#)
    };
    let mut huge_header = good.clone();
    huge_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let files = [
        ("truncated", good[..good.len() - 1].to_vec(), "a whole safetensors file"),
        ("halved", good[..good.len() / 2].to_vec(), "a whole safetensors file"),
        ("empty", Vec::new(), "a whole safetensors file"),
        (
            "noise",
            (0..4096u32).map(|i| (i.wrapping_mul(2654435761) >> 13) as u8).collect(),
            "a whole safetensors file",
        ),
        ("huge-header", huge_header, "a whole safetensors file"),
        ("deep-header", safetensors(&"[".repeat(100_000), 0), "a whole safetensors file"),
        (
            "huge-shape",
            safetensors(&tensor("q", "[4294967296,4294967296,4294967296]", 4), 4),
            "a whole safetensors file",
        ),
        (
            "unknown-tensor",
            safetensors(&tensor("quux", "[1]", 4), 4),
            "`quux` is an unknown tensor",
        ),
        ("no-keys", safetensors(&tensor("q", "[1]", 4), 4), "`k` is missing"),
    ];
    for (name, bytes, _) in &files {
        std::fs::write(directory.join(format!("{name}.safetensors")), bytes).expect("a file");
    }
    files.into_iter().map(|(name, _, message)| (name, message)).collect()
}

#[test]
fn bad_files_are_reported_and_stop_nothing() {
    let directory = directory("bad-files");
    let bad = write_bad(&directory);
    write_good("good", &directory);
    write_good("zulu", &directory);
    let out = support::directory("bad-files-out");
    let missing = directory.join("missing.safetensors");

    let ran = regard(&["run", text(&directory), text(&missing), "--out", text(&out)]);
    assert_eq!(
        (ran.status, ran.stdout.as_str()),
        (1, format!("2 written, {} failed\n", bad.len() + 1).as_str())
    );
    let errors: Vec<_> = ran.stderr.lines().collect();
    assert_eq!(errors.len(), bad.len() + 1, "{}", ran.stderr);
    for (name, message) in bad.iter().chain([&("missing", "`file` is unreadable")]) {
        let named = format!("{name}.safetensors: ");
        let names_it = |line: &&&str| {
            line.starts_with("error: ") && line.contains(&named) && line.contains(message)
        };
        assert_eq!(errors.iter().filter(names_it).count(), 1, "{name}: {}", ran.stderr);
    }
    assert!(out.join("good.safetensors").exists() && out.join("zulu.safetensors").exists());
    assert!(!out.join("truncated.safetensors").exists());

    std::fs::remove_dir_all(&out).expect("removed");
    let ran = regard(&["check", text(&directory), "--json"]);
    assert_eq!((ran.status, ran.stderr.as_str()), (1, ""));
    let report = ran.json();
    assert_eq!((&report["passed"], &report["failed"]), (&2.into(), &bad.len().into()));
    for (name, message) in bad {
        let line = report["cases"].as_array().into_iter().flatten();
        let line = line.filter(|line| {
            line["case"].as_str().is_some_and(|case| case.contains(&format!("{name}.")))
        });
        let errors: Vec<_> =
            line.map(|line| (line["passed"].clone(), line["error"].to_string())).collect();
        assert!(
            errors.len() == 1 && errors[0].0 == false && errors[0].1.contains(message),
            "{name}: {errors:?}"
        );
    }
}

#[test]
fn check_judges_and_counts() {
    let directory = directory("check");
    let good = write_good("good", &directory);
    let shown = regard(&["check", text(&good)]).done();
    let (line, end) = shown.split_once('\n').expect("two lines");
    assert_eq!(end, "1 passed, 0 failed\n");
    assert!(
        line.starts_with("ok   ") && line.contains("cpu_") && line.contains("GFLOP/s"),
        "{line}"
    );
    assert!(line.contains("40 rows"), "{line}");

    // Another file's expected tensors: they differ from the attention of these operands.
    let mut wrong = spec("wrong").generate();
    wrong.expected_out =
        Some(Array::new(vec![0.5f32; 2 * 5 * 4 * 16], &[2, 5, 4, 16]).expect("contiguous"));
    write(&wrong, &directory);
    let ran = regard(&["check", text(&directory), "--threads", "1"]);
    assert_eq!((ran.status, ran.stderr.as_str()), (1, ""));
    let lines: Vec<_> = ran.stdout.lines().collect();
    assert_eq!(lines.last(), Some(&"1 passed, 1 failed"));
    assert!(
        lines[1].starts_with("FAIL ")
            && lines[1].contains("the expected tensors in the file disagree")
    );

    let decode = Spec::new("decode").lengths(&[(1, 300)]).generate();
    let decode = write(&decode, &directory);
    let few = ["check", text(&decode), "--rows", "2", "--repeat", "1", "--json"];
    let report = regard(&few).json();
    let case = &report["cases"][0];
    assert_eq!((&case["passed"], &case["expected"]), (&true.into(), &Value::Null));
    assert!(case["rows"].as_u64().is_some_and(|rows| (1..=2).contains(&rows)), "{case}");
    for number in ["seconds", "gflops", "gbytes", "out_error", "lse_error", "worst"] {
        assert!(case[number].as_f64().is_some(), "{number}: {case}");
    }
}

#[test]
fn check_refuses_repetitions_that_mean_nothing() {
    for arguments in [["--cases=trees/", "--repeat", "0"], ["--random=1", "--repeat", "2"]] {
        // clap's words: an error line, then usage.
        let ran = regard(&[&["check"], &arguments[..]].concat());
        assert_eq!(ran.status, 2, "{}", ran.stderr);
        let first = ran.stderr.lines().next().unwrap_or_default();
        assert!(first.starts_with("error: ") && first.contains("--repeat"), "{first}");
    }
}

#[test]
fn check_runs_the_built_in_cases() {
    let shown = regard(&["check", "--cases=trees/"]).done();
    let count = shown.lines().filter(|line| line.starts_with("ok   trees/")).count();
    assert!(count > 3 && shown.ends_with(&format!("\n{count} passed, 0 failed\n")), "{shown}");
    let first = shown.lines().next().and_then(|line| line.split_whitespace().nth(1)).unwrap();
    let others = regard(&["check", "--cases=trees/", "--without", first]).done();
    assert!(!others.contains(first) && others.contains("trees/"), "{others}");
    regard(&["check", "--cases=nothing/"])
        .failed(2, &["`--cases` is \"nothing/\"", "lengths", "random"]);
}

#[test]
fn nothing_to_do_is_a_failure() {
    let directory = directory("nothing");
    std::fs::write(directory.join("README.md"), "no case").expect("a file");
    let message = ["a directory without case files", "*.safetensors"];
    regard(&["check", text(&directory)]).failed(1, &message);
    regard(&["run", text(&directory), "--out", text(&directory.join("out"))]).failed(1, &message);
    for arguments in [&["check"][..], &["run", "--out", "x"], &["run", "x"], &[], &["benchmark"]] {
        assert_eq!(regard(arguments).status, 2, "{arguments:?}");
    }
}

#[test]
fn devices_that_are_not_here_are_refused() {
    let directory = directory("devices");
    let path = write_good("some", &directory);
    let out = directory.join("out");
    let mut absent = vec![("metal", "Apple's systems")];
    if regard(&["info", "--json"]).json()["gpus"].as_array().unwrap().is_empty() {
        absent.extend([("cuda", "driver"), ("cuda:1", "driver")]);
    }
    for (device, words) in absent {
        regard(&["check", text(&path), "--device", device]).failed(3, &[words]);
        regard(&["run", text(&path), "--out", text(&out), "--device", device]).failed(3, &[words]);
    }
    assert!(!out.exists());
    regard(&["check", text(&path), "--device", "tpu"])
        .failed(2, &["`device` is \"tpu\"", "allowed: cpu"]);
    regard(&["check", "--laws"]).failed(2, &["`--laws` is on the CPU", "--device cuda"]);
    regard(&["check", "--coverage"])
        .failed(2, &["`--coverage` is on a device that it cannot cover", "--device cuda"]);
}

#[test]
fn help_and_version_are_results() {
    for arguments in [&["--help"][..], &["--version"], &["plan", "--help"], &["help", "check"]] {
        let shown = regard(arguments).done();
        assert!(shown.to_lowercase().contains("regard"), "{shown}");
    }
    assert!(regard(&["plan", "--help"]).done().contains("log-sum-exp too"));
}

#[cfg(unix)]
#[test]
fn a_closed_pipe_is_no_panic() {
    let mut child = command(&["check", "--cases"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    // Read one line's worth and go away.
    let mut stdout = child.stdout.take().expect("a pipe");
    stdout.read_exact(&mut [0; 16]).expect("a first line");
    drop(stdout);
    let output = child.wait_with_output().expect("ends");
    assert_eq!(
        (output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()),
        (Some(141), "")
    );
}

#[test]
fn check_tries_random_problems() {
    let out = directory("random");
    let out = text(&out);
    let shown =
        regard(&["check", "--random", "20", "--seed", "3", "--profile", "small", "--out", out]);
    // The summary is complete for any result: the seed, the counts.
    assert!(
        shown.stdout.starts_with("random problems 0..=19 of seed 3 on cpu\n"),
        "{}",
        shown.stdout
    );
    assert!(
        shown.stdout.ends_with(" failed\n") && shown.stdout.contains(" rows judged, "),
        "{}",
        shown.stdout
    );
    // The same problems again, as JSON; a part of them by their numbers.
    let arguments =
        ["check", "--random", "20", "--seed", "3", "--profile", "small", "--out", out, "--json"];
    let all = regard(&arguments).json();
    assert_eq!(all["passed"].as_u64().unwrap() + all["failed"].as_u64().unwrap(), 20, "{all}");
    let first = regard(&[
        "check",
        "--random",
        "12",
        "--seed",
        "3",
        "--profile",
        "small",
        "--out",
        out,
        "--json",
    ]);
    let rest = [
        "check",
        "--random",
        "8",
        "--first",
        "12",
        "--seed",
        "3",
        "--profile",
        "small",
        "--out",
        out,
        "--json",
    ];
    let (first, rest) = (first.json(), regard(&rest).json());
    for count in ["passed", "failed", "rows", "arrangements"] {
        let sum = first[count].as_u64().unwrap() + rest[count].as_u64().unwrap();
        assert_eq!(Some(sum), all[count].as_u64(), "{count}");
    }
    // Without a seed a new one is chosen, and printed.
    let runs = [(); 2].map(|()| regard(&["check", "--random", "1", "--out", out, "--json"]).json());
    assert_ne!(runs[0]["seed"], runs[1]["seed"]);
    // Not with options that it would ignore.
    assert_eq!(regard(&["check", "--random", "1", "--cases"]).status, 2);
    assert_eq!(regard(&["check", "--cases", "--seed", "1"]).status, 2);
    assert_eq!(regard(&["check", "--random", "1", "--profile", "large"]).status, 2);
}
