//! Builds and checks sample kernels with the real compilers.

use super::nvrtc::Nvrtc;
use super::*;
use std::collections::BTreeMap;
use std::fs;

const SAMPLE: &str = r#"#include "sample.cuh"

extern "C" __global__ void scale_in_place(float* data, unsigned count) {
    __shared__ float staged[64];
    unsigned index = blockIdx.x * 64 + threadIdx.x;
    if (index < count) {
        staged[threadIdx.x] = data[index];
        data[index] = scaled(staged[threadIdx.x]);
    }
}
"#;

const HEADER: &str = "inline float scaled(float x) { return x * FACTOR; }\n";

/// Indexes an array by a number that only the device knows: it cannot stay in registers.
const SPILLING: &str = r#"extern "C" __global__ void shuffle(int* data, int rounds) {
    int kept[32];
    for (int i = 0; i < 32; i++) kept[i] = data[i];
    for (int i = 0; i < rounds; i++) kept[data[i] & 31] += kept[i & 31];
    for (int i = 0; i < 32; i++) data[i] = kept[i];
}
"#;

fn module(name: &str, source: &str, architecture: &str) -> Module {
    Module {
        name: name.into(),
        source: source.into(),
        defines: vec![("FACTOR".into(), "3.0f".into())],
        architecture: architecture.into(),
        specialized: false,
        uses_wgmma: false,
        replaced_on_hopper: false,
        must_not_spill: true,
    }
}

/// A separate folder for a test, with the sample sources.
fn folders(test: &str) -> Folders {
    let root = crate::scratch().join("test").join(test);
    let _ = fs::remove_dir_all(&root);
    let folders = Folders {
        kernels: root.join("kernels"),
        images: root.join("images"),
        scratch: root.join("scratch"),
    };
    fs::create_dir_all(&folders.kernels).expect("a writable target folder");
    for (name, text) in [("sample.cu", SAMPLE), ("sample.cuh", HEADER), ("spilling.cu", SPILLING)] {
        fs::write(folders.kernels.join(name), text).expect("a writable target folder");
    }
    folders
}

/// The compilers. Without them the test prints that it is skipped; on CI it fails.
fn tools() -> Option<Tools> {
    // One installs, the others wait.
    static INSTALLING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _guard = INSTALLING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match Tools::obtain() {
        Ok(tools) => Some(tools),
        Err(error) if std::env::var_os("CI").is_some() => panic!("{error:#}"),
        Err(error) => {
            eprintln!("SKIPPED: {error:#}");
            None
        }
    }
}

fn setup<'a>(folders: &'a Folders, tools: &'a Tools) -> Setup<'a> {
    everything().setup(folders, tools)
}

fn everything() -> Selection {
    Selection { only: None, arch: Vec::new(), jobs: None }
}

#[test]
fn a_built_module_checks_and_a_changed_source_does_not() {
    let Some(tools) = tools() else { return };
    let folders = folders("build");
    let modules = [
        module("sample", "sample.cu", "compute_80"),
        module("sample_90a", "sample.cu", "compute_90a"),
    ];
    build(&modules, &everything(), setup(&folders, &tools)).expect("the sample builds");
    let ptx = fs::read_to_string(folders.scratch.join("sample.ptx")).expect("written");
    assert!(ptx.starts_with(".version 8.0\n.target sm_80\n"), "{ptx}");
    let first = fs::read(folders.images.join("sample.ptx.lzma")).expect("written");
    let index = fs::read_to_string(folders.images.join("index.rs")).expect("written");
    assert!(index.contains("include_bytes!(\"sample_90a.sm_90a.lzma\")"), "{index}");
    check(&modules, Rebuild::EachKind, &everything(), setup(&folders, &tools))
        .expect("nothing has changed");

    build(&modules, &everything(), setup(&folders, &tools)).expect("the sample builds again");
    assert_eq!(
        first,
        fs::read(folders.images.join("sample.ptx.lzma")).expect("written"),
        "the same bytes"
    );

    fs::write(folders.kernels.join("sample.cuh"), HEADER.replace('*', "+")).expect("writable");
    fs::write(folders.images.join("gone.ptx.lzma"), "").expect("writable");
    let error = check(&modules, Rebuild::EachKind, &everything(), setup(&folders, &tools))
        .expect_err("the header has changed");
    let error = error.to_string();
    for part in [
        "module sample ships",
        "the first difference is line",
        "cargo xtask cuda build",
        "gone.ptx.lzma ships",
        "module sample_90a ships",
        "bytes of machine code for sm_80",
    ] {
        assert!(error.contains(part), "{error}");
    }

    build(&modules, &everything(), setup(&folders, &tools)).expect("the sample builds");
    assert!(!folders.images.join("gone.ptx.lzma").exists());
}

#[test]
fn the_record_vouches_for_what_was_built_and_for_nothing_else() {
    let Some(tools) = tools() else { return };
    let folders = folders("record");
    // Each module has its own kind, but the second has the kind of the first: it is not built
    // again.
    let mut modules =
        [("sample", "sample.cu"), ("second", "sample.cu"), ("spilling", "spilling.cu")].map(
            |(name, source)| Module { must_not_spill: false, ..module(name, source, "compute_80") },
        );
    let selection = everything();
    let check =
        |modules: &[Module], rebuild| check(modules, rebuild, &selection, setup(&folders, &tools));
    let rebuilt = |name: &str| folders.scratch.join(format!("{name}.ptx")).exists();
    let forget = || fs::remove_dir_all(&folders.scratch).expect("it was there");
    build(&modules, &selection, setup(&folders, &tools)).expect("it builds");
    forget();
    check(&modules, Rebuild::EachKind).expect("nothing has changed");
    assert!(rebuilt("sample") && rebuilt("spilling") && !rebuilt("second"));
    check(&modules, Rebuild::All).expect("nothing has changed");
    assert!(rebuilt("second"));

    // A macro, an option of the module, its images or the sources: no fingerprint outlives them.
    let not_recorded = |modules: &[Module]| {
        forget();
        let error =
            check(modules, Rebuild::EachKind).expect_err("something has changed").to_string();
        assert!(error.contains("module second: record.txt has no fingerprint"), "{error}");
        assert!(rebuilt("second"));
        error
    };
    modules[1].defines[0].1 = "4.0f".into();
    assert!(not_recorded(&modules).contains("module second ships"));
    modules[1].defines[0].1 = "3.0f".into();
    modules[1].must_not_spill = true;
    assert!(!not_recorded(&modules).contains("module second ships"));
    modules[1].must_not_spill = false;
    let (image, other) =
        (folders.images.join("second.sm_80.lzma"), folders.images.join("spilling.sm_80.lzma"));
    let kept = fs::read(&image).expect("written");
    fs::copy(other, &image).expect("writable");
    not_recorded(&modules);
    fs::write(&image, kept).expect("writable");
    fs::write(folders.kernels.join("sample.cuh"), format!("{HEADER}// A remark.\n"))
        .expect("writable");
    assert!(!not_recorded(&modules).contains("module second ships"));

    // A module that breaks a rule is built, but gets no fingerprint.
    modules[2].must_not_spill = true;
    build(&modules, &selection, setup(&folders, &tools)).expect("it builds");
    let record = fs::read_to_string(folders.images.join(record::FILE)).expect("written");
    assert!(
        record.contains("sample ") && record.contains("second ") && !record.contains("spilling "),
        "{record}"
    );
    let error =
        check(&modules, Rebuild::EachKind).expect_err("a kernel that must not spill").to_string();
    assert!(
        error.contains("kernel shuffle must not spill")
            && error.contains("module spilling: record.txt"),
        "{error}"
    );
    // Building one module leaves the lines of the others.
    let selection = Selection { only: Some("second".into()), ..everything() };
    build(&modules, &selection, setup(&folders, &tools)).expect("it builds");
    assert_eq!(record, fs::read_to_string(folders.images.join(record::FILE)).expect("written"));
}

#[test]
fn the_quarters_are_all_kinds_together() {
    let packages = packages();
    let all = packages.iter().flat_map(|package| sample(&package.modules, Rebuild::EachKind));
    let all: BTreeSet<_> = all.collect();
    let quarter = |quarter| {
        packages.iter().flat_map(move |package| sample(&package.modules, Rebuild::Quarter(quarter)))
    };
    let mut found = BTreeSet::new();
    for number in 0..QUARTERS {
        let names: Vec<_> = quarter(number).collect();
        assert!((all.len() / 5..=all.len() / 3).contains(&names.len()), "{number}: {names:?}");
        assert!(names.iter().all(|name| found.insert(*name)), "{number}: {names:?}");
    }
    assert_eq!(found, all);
}

#[test]
fn local_memory_in_a_kernel_that_must_not_spill_is_an_error() {
    let Some(tools) = tools() else { return };
    let folders = folders("spills");
    let mut modules = [module("spilling", "spilling.cu", "compute_80")];
    build(&modules, &everything(), setup(&folders, &tools)).expect("it builds");
    let error = check(&modules, Rebuild::EachKind, &everything(), setup(&folders, &tools))
        .expect_err("a kernel that must not spill")
        .to_string();
    assert!(
        error.contains(
            "sm_120: kernel shuffle must not spill, but (with what it calls) uses 128 bytes of \
             local memory"
        ),
        "{error}"
    );
    modules[0].must_not_spill = false;
    build(&modules, &everything(), setup(&folders, &tools)).expect("it builds");
    check(&modules, Rebuild::EachKind, &everything(), setup(&folders, &tools))
        .expect("a kernel that may spill");
}

#[test]
fn compiler_messages_are_in_the_error() {
    let Some(tools) = tools() else { return };
    let nvrtc = Nvrtc::load(&tools.nvrtc).expect("it loads");
    let text = "extern \"C\" __global__ void broken() { unknown(); }";
    let sources =
        Sources::new(BTreeMap::from([("broken.cu".into(), text.into())])).expect("self-contained");
    let error = nvrtc
        .compile(&sources, &module("broken", "broken.cu", "compute_80"))
        .expect_err("an unknown name");
    assert!(error.to_string().contains("broken.cu(1): error: identifier \"unknown\""), "{error}");
}

#[test]
fn modules_bound_to_an_architecture_assemble_there_only() {
    let fallback = module("fallback", "sample.cu", "compute_80");
    let hopper = module("hopper", "sample.cu", "compute_90a");
    assert_eq!(fallback.targets(&ARCHITECTURES), ARCHITECTURES);
    assert_eq!(hopper.targets(&ARCHITECTURES), ["sm_90a"]);
    assert!(hopper.targets(&["sm_120"]).is_empty());
    let since_hopper = module("since_hopper", "sample.cu", "compute_90");
    assert_eq!(since_hopper.targets(&ARCHITECTURES), ["sm_90a", "sm_100", "sm_120"]);
}

#[test]
fn the_shipped_list_has_usable_names() {
    let all: Vec<_> = packages().into_iter().flat_map(|package| package.modules).collect();
    ship::check_names(&all).expect("plain names, each once");
}

/// The modules as they are built. A change of a line means that the module has to be built again.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/modules.txt");

/// Writes the file of modules instead of comparing with it.
const WRITE: &str = "REGARD_WRITE_MODULES";

#[test]
fn the_registry_is_that_of_the_golden_file() {
    let line = |Module { name, source, defines, architecture, must_not_spill, .. }: &Module| {
        let spills = if *must_not_spill { "must_not_spill" } else { "may_spill" };
        let defines: Vec<_> =
            defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
        format!("{name} {source} {architecture} {spills} {}", defines.join(" ")).trim_end().into()
    };
    let packages = packages();
    let listed: Vec<String> =
        packages.iter().flat_map(|package| &package.modules).map(line).collect();
    if std::env::var_os(WRITE).is_some() {
        fs::write(GOLDEN, listed.join("\n") + "\n").expect("a writable source folder");
        return;
    }
    let golden = fs::read_to_string(GOLDEN).expect("committed");
    for (listed, golden) in listed.iter().zip(golden.lines()) {
        assert_eq!(listed, golden, "{WRITE}=1 writes {GOLDEN}");
    }
    assert_eq!(listed.len(), golden.lines().count(), "{WRITE}=1 writes {GOLDEN}");
}
