//! `regard bench`, run as its users run it, on shapes that take milliseconds. No test looks at
//! how fast anything was.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    command.arg("bench").args(arguments).output().expect("the command starts")
}

/// A run that takes hardly any time.
fn quick(arguments: &[&str]) -> Output {
    bench(
        &[arguments, &["--seconds", "0", "--repeat", "2", "--rows", "6", "--no-ceilings"]].concat(),
    )
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

#[track_caller]
fn done(output: &Output) -> &str {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    text(&output.stdout)
}

#[track_caller]
fn results(output: &Output) -> Vec<Value> {
    serde_json::from_str(done(output)).expect("a JSON array")
}

#[track_caller]
fn failed(output: &Output, status: i32, texts: &[&str]) {
    assert_eq!(output.status.code(), Some(status), "{}", text(&output.stderr));
    for wanted in texts {
        let found = text(&output.stderr);
        assert!(
            found.starts_with("error: ") && found.contains(wanted),
            "{found}: lacks {wanted:?}"
        );
    }
}

/// A path of the test's own without a file yet.
fn path(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{name}"));
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn json_has_an_object_for_each_shape() {
    let results = results(&quick(&["tiny", "--shape", "hq=4 hkv=2 d=16 lq=20 causal", "--json"]));
    let found: Vec<_> = results.iter().map(|result| (&result["name"], &result["dtype"])).collect();
    let words = json!("hq=4 hkv=2 d=16 lq=20 causal");
    let (tiny, f32, bf16, f16) = (json!("tiny"), json!("f32"), json!("bf16"), json!("f16"));
    let expected = [
        (&tiny, &f32),
        (&tiny, &bf16),
        (&tiny, &f16),
        (&words, &f32),
        (&words, &bf16),
        (&words, &f16),
    ];
    assert_eq!(found, expected);
    for result in &results {
        assert_eq!((&result["device"], &result["peer"]), (&json!("cpu"), &json!("regard")));
        assert!(
            result["kernel"].as_str().is_some_and(|kernel| kernel.starts_with("cpu_")),
            "{result}"
        );
        for number in ["seconds", "gflops", "gbytes_per_second", "max_error"] {
            assert!(
                result[number].as_f64().is_some_and(|number| number > 0.0),
                "{number}: {result}"
            );
        }
        // Nothing was measured that these could be compared with.
        assert_eq!(
            (&result["ceiling"], &result["fraction_of_ceiling"]),
            (&Value::Null, &Value::Null)
        );
    }
}

#[test]
fn ceilings_are_measured_with_the_threads_in_use() {
    let words = "hq=4 hkv=2 d=64 lq=64 causal";
    let shape = ["--shape", words, "--dtype", "f32", "--threads", "1", "--seconds", "0", "--json"];
    let results = results(&bench(&shape));
    let result = &results[0];
    let ceilings = &result["ceilings"];
    assert_eq!((&result["threads"], &ceilings["threads"]), (&json!(1), &json!(1)));
    assert!(ceilings["read"].as_f64().is_some_and(|read| read > 0.0), "{ceilings}");
    assert!(ceilings["f32"][0]["gflops"].as_f64().is_some_and(|gflops| gflops > 0.0), "{ceilings}");
    let [gflops, ceiling, fraction] = ["gflops", "ceiling", "fraction_of_ceiling"]
        .map(|number| result[number].as_f64().expect("a number"));
    if result["bound"]["kind"] == "products" {
        assert!((gflops / ceiling - fraction).abs() < 1e-9, "{result}");
    }
}

#[test]
fn variants_run_and_are_judged() {
    let variants = [
        "plain",
        "page=4",
        "window=8,0",
        "mask=bool",
        "mask=f32 softcap alibi sinks lse",
        "invariant",
        "ragged",
        "kv=i8 scale=token-head",
        "kv=e4m3 page=4 scale=page-head",
        "k=q8_0 v=q4_0 ragged",
    ];
    let mut arguments =
        vec!["--shape", "b=2 hq=4 hkv=2 d=32 lq=20 causal", "--dtype", "f16", "--json"];
    for variant in variants {
        arguments.extend(["--with", variant]);
    }
    let results = results(&quick(&arguments));
    assert_eq!(results.len(), variants.len());
    for (result, variant) in results.iter().zip(variants).skip(1) {
        assert!(result["name"].as_str().is_some_and(|name| name.ends_with(variant)), "{result}");
    }
    let head = quick(&[
        "--shape",
        "hq=4 d=16 lq=20",
        "--with",
        "plain",
        "--with",
        "page=4",
        "--layout",
        "token,head",
    ]);
    let shown = done(&head);
    assert_eq!(shown.lines().filter(|line| line.contains("head-major")).count(), 6, "{shown}");
}

#[test]
fn results_are_kept_compared_and_drawn() {
    let (file, picture) = (path("kept.json"), path("drawn.svg"));
    let (file, picture) = (file.to_str().expect("UTF-8"), picture.to_str().expect("UTF-8"));
    let shape = ["--shape", "hq=4 hkv=2 d=16 lq=1 lk=64", "--warm", "--dtype", "f32,f16"];
    done(&quick(&[&shape[..], &["--lengths", "16,32,64", "--out", file]].concat()));
    let again =
        bench(&["--from", file, "--from", file, "--against", file, "--plot", picture, "--json"]);
    let results = results(&again);
    assert_eq!(results.len(), 6);
    for result in &results {
        assert_eq!(result["against"][0]["ratio"], 1.0);
        assert!(
            result["against"][0]["peer"]
                .as_str()
                .is_some_and(|peer| peer.starts_with("regard before"))
        );
    }
    let drawn = std::fs::read_to_string(picture).expect("a picture");
    assert!(
        drawn.starts_with("<svg") && drawn.contains("Decode") && drawn.contains("Roofline"),
        "{drawn}"
    );

    let markdown = bench(&["--from", file, "--against", file, "--markdown"]);
    let shown = done(&markdown);
    assert!(
        shown.contains("| hq=4 hkv=2 d=16 lq=1 lk=64 at 16 | f32 |") && shown.contains("(1.00x)"),
        "{shown}"
    );
    let other = quick(&["tiny", "--against", file]);
    failed(
        &other,
        1,
        &[file, "nothing in it was measured with the same shapes, types and threads"],
    );
}

#[test]
fn bad_arguments_are_named() {
    failed(&quick(&["p99"]), 2, &["`shape` is \"p99\"", "p2048, p512", "tiny"]);
    failed(&quick(&["--shape", "hq=4 d=64"]), 2, &["`lq` is missing"]);
    failed(&quick(&["tiny", "--with", "soft"]), 2, &["`shape key` is \"soft\""]);
    failed(&quick(&["tiny", "--dtype", "f64"]), 2, &["`dtype` is \"f64\"", "f32, bf16, f16"]);
    failed(&quick(&["tiny", "--layout", "bshd"]), 2, &["token, head"]);
    failed(
        &quick(&["tiny", "--with", "ragged", "--layout", "head"]),
        1,
        &["`layout` is \"head\" with ragged keys"],
    );
    failed(&bench(&["tiny", "--seconds=-1"]), 2, &["--seconds", "0 to 86400"]);
    failed(&bench(&["tiny", "--from", "x"]), 2, &["--from"]);
    failed(&quick(&["tiny", "--device", "metal"]), 3, &["Apple's systems"]);
    failed(&bench(&["--from", "no-such-file.json"]), 1, &["no-such-file.json"]);
    let broken = path("broken.json");
    std::fs::write(&broken, "{").expect("a file");
    failed(&bench(&["--from", broken.to_str().expect("UTF-8")]), 1, &["not a result file"]);
}

#[test]
fn shapes_larger_than_memory_are_refused() {
    for words in [
        "hq=1 d=8 lq=1 lk=2147483647 b=1000",
        "b=2147483647 hq=1 d=576 lq=1 lk=2147483647",
        "hq=1 d=8 lq=1 lk=1 page=2147483647 b=1000 hkv=1 dv=576",
        "hq=1 d=8 lq=2147483647 lk=2147483647 mask=f32",
        "hq=1 d=8 lq=2147483647 lk=2147483647 tree",
        "hq=2147483647 hkv=1 d=576 lq=100000 lk=1",
    ] {
        let output = quick(&["--shape", words, "--dtype", "f32"]);
        failed(
            &output,
            1,
            &[
                "`memory` is ",
                "B for the operands of this shape; allowed: at most ",
                "what there is",
            ],
        );
        assert_eq!(text(&output.stderr).lines().count(), 1);
    }
    // Limits of the process count as well, and for the buffers that ceilings are read from.
    #[cfg(target_os = "linux")]
    {
        let mut limited = Command::new("sh");
        limited.args([
            "-c",
            "ulimit -v 600000; exec \"$@\"",
            "sh",
            env!("CARGO_BIN_EXE_regard"),
            "bench",
            "tiny",
        ]);
        limited.args(["--dtype", "f32", "--seconds", "0", "--threads", "1"]);
        let output = limited.output().expect("a shell");
        failed(&output, 1, &["for measuring ceilings (not with --no-ceilings); allowed: "]);
    }
    // The others go on.
    let output =
        quick(&["--shape", "hq=1 d=8 lq=2147483647 mask=f32", "tiny", "--dtype", "f32", "--json"]);
    failed(&output, 1, &["`memory` is "]);
    let results: Value = serde_json::from_str(text(&output.stdout)).expect("JSON");
    assert_eq!(
        (results[0]["name"].as_str(), results.as_array().map(Vec::len)),
        (Some("tiny"), Some(1))
    );
}

#[test]
fn where_results_go_is_looked_at_first() {
    let nowhere = path("no-such-folder").join("results.json");
    let nowhere = nowhere.to_str().expect("UTF-8");
    let folder = env!("CARGO_TARGET_TMPDIR");
    // So much would take minutes.
    let long = ["tiny", "--dtype", "f32", "--seconds", "3600", "--no-ceilings"];
    for arguments in [["--out", nowhere], ["--plot", nowhere], ["--out", folder]] {
        let output = bench(&[&long[..], &arguments].concat());
        failed(&output, 1, &[arguments[1], "cannot be written"]);
        assert_eq!(text(&output.stdout), "");
    }
    let both = path("both");
    let both = both.to_str().expect("UTF-8");
    failed(
        &bench(&[&long[..], &["--out", both, "--plot", both]].concat()),
        2,
        &["`--plot` is the file of --out"],
    );
    assert!(!Path::new(both).exists());
}

#[test]
fn measurements_are_kept_after_a_later_failure() {
    let (file, other) = (path("kept-anyway.json"), path("other-work.json"));
    let (file, other) = (file.to_str().expect("UTF-8"), other.to_str().expect("UTF-8"));
    done(&quick(&["--shape", "hq=2 d=8 lq=4", "--dtype", "f32", "--out", other]));
    let output = quick(&["tiny", "--dtype", "f32", "--against", other, "--out", file, "--json"]);
    failed(&output, 1, &["nothing in it was measured"]);
    let [printed, kept] =
        [text(&output.stdout).to_string(), std::fs::read_to_string(file).expect("kept")];
    assert_eq!(
        serde_json::from_str::<Value>(&printed).expect("JSON"),
        serde_json::from_str::<Value>(&kept).expect("JSON")
    );
    assert_eq!(results(&bench(&["--from", file, "--json"])).len(), 1);
}

#[test]
fn several_numbers_of_threads_are_measured_with_the_same_operands() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let list = if cores > 1 { "2,1,2" } else { "1" };
    let shape = ["--shape", "hq=4 hkv=2 d=16 lq=20 causal", "--dtype", "f32", "--scaling"];
    let all = results(&quick(&[&shape[..], &[list, "--json"]].concat()));
    let found: Vec<_> = all.iter().map(|result| result["threads"].as_u64()).collect();
    assert_eq!(found, if cores > 1 { vec![Some(1), Some(2)] } else { vec![Some(1)] });
    let table = quick(&[&shape[..], &[list, "--markdown"]].concat());
    assert_eq!(done(&table).contains("| speed-up |"), cores > 1, "{}", done(&table));

    let many = (cores + 1).to_string();
    for wrong in ["0", &many] {
        let allowed = format!("`--scaling` is {wrong}; allowed: 1 to {cores} threads");
        failed(&quick(&[&shape[..], &[wrong]].concat()), 2, &[&allowed]);
    }
    failed(&quick(&[&shape[..], &["1", "--threads", "1"]].concat()), 2, &["--threads"]);
    failed(&quick(&[&shape[..], &["1", "--model", "phi-2"]].concat()), 2, &["--scaling"]);
}

#[test]
fn options_of_other_devices_are_refused() {
    let shape = ["--shape", "hq=1 d=16 lq=1", "--dtype", "f32"];
    for option in [["--layers", "4"], ["--pause", "0.5"]] {
        let message = format!("`{}` is {}; allowed: on --device cuda only", option[0], option[1]);
        failed(&quick(&[&shape[..], &option].concat()), 2, &[&message]);
    }
}

#[test]
fn result_files_that_make_no_sense_are_refused() {
    let record = |change: (&str, Value)| {
        let mut record = json!({
            "name": "a", "peer": "x", "device": "cpu", "threads": 1, "dtype": "f32",
            "seconds": 1.0, "gflops": 1.0, "gbytes_per_second": 1.0, "length": 8,
        });
        record[change.0] = change.1;
        json!([record]).to_string()
    };
    let (file, picture) = (path("senseless.json"), path("senseless.svg"));
    let show = |contents: String| {
        std::fs::write(&file, contents).expect("a file");
        bench(&[
            "--from",
            file.to_str().expect("UTF-8"),
            "--plot",
            picture.to_str().expect("UTF-8"),
        ])
    };
    done(&show(record(("length", json!(16)))));
    for (name, number) in [
        ("seconds", json!(0)),
        ("seconds", json!(-1)),
        ("gflops", json!(-2.0)),
        ("gbytes_per_second", json!(-1e300)),
        ("length", json!(0)),
        ("flops_per_byte", json!(-3)),
    ] {
        failed(&show(record((name, number))), 1, &["not a result file", name]);
    }
    let wild = [json!(1e-300), json!(1e300), json!(5e-324)];
    for (name, number) in
        ["seconds", "gflops"].into_iter().flat_map(|name| wild.clone().map(|n| (name, n)))
    {
        assert!(show(record((name, number))).status.code().is_some_and(|status| status < 2));
    }
    // Axes from one to the other would have no end.
    for (name, number) in
        [("gflops", json!(1e300)), ("gbytes_per_second", json!(0)), ("length", json!(usize::MAX))]
    {
        failed(&show(record((name, number))), 1, &["cannot be drawn"]);
    }
    let output = show(record(("name", json!("\u{1b}[31mred\u{9b}"))));
    let shown = done(&output);
    assert!(shown.contains("\\u{1b}[31mred\\u{9b}") && !shown.contains('\u{1b}'), "{shown}");
    let drawn = std::fs::read_to_string(&picture).expect("a picture");
    assert!(!drawn.contains(|c: char| c.is_control() && c != '\n'), "{drawn}");
}

#[test]
fn models_are_layers_and_their_sum() {
    let arguments = ["--model", "gpt-oss-20b", "--workload", "decode-b1,prefill-2k"];
    let results = results(&quick(&[&arguments[..], &["--lengths", "32", "--json"]].concat()));
    let found: Vec<_> = results.iter().map(|result| (&result["name"], &result["layers"])).collect();
    let names = [
        ("gpt-oss-20b decode-b1 local at 32", 12),
        ("gpt-oss-20b decode-b1 global at 32", 12),
        ("gpt-oss-20b decode-b1 all layers at 32", 24),
        ("gpt-oss-20b prefill-2k local at 32", 12),
        ("gpt-oss-20b prefill-2k global at 32", 12),
        ("gpt-oss-20b prefill-2k all layers at 32", 24),
    ]
    .map(|(name, layers)| (json!(name), json!(layers)));
    assert_eq!(found, names.each_ref().map(|(name, layers)| (name, layers)));
    let seconds = |i: usize| results[i]["seconds"].as_f64().expect("a number");
    assert!((seconds(2) - 12.0 * (seconds(0) + seconds(1))).abs() < 1e-9);
    for result in &results {
        assert_eq!((&result["dtype"], &result["model"]), (&json!("bf16"), &json!("gpt-oss-20b")));
    }
}

#[test]
fn a_mixed_step_of_a_model_runs() {
    let arguments = ["--model", "smollm2-135m", "--workload", "mixed-small", "--lengths", "512"];
    let output = quick(&arguments);
    let table = done(&output);
    assert!(table.contains("layers") && table.contains("all layers"), "{table}");
}

#[test]
fn unknown_models_and_workloads_are_named() {
    failed(&quick(&["--model", "llama-9"]), 2, &["`model` is \"llama-9\"", "gemma-3-27b"]);
    let arguments = ["--model", "phi-4", "--workload", "train"];
    failed(&quick(&arguments), 2, &["`workload` is \"train\"", "decode-b64"]);
    failed(&quick(&["--model", "phi-4", "d4k"]), 2, &["cannot be used with"]);
    failed(&quick(&["--workload", "mixed"]), 2, &["--model"]);
}
