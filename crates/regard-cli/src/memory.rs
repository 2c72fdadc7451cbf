//! Checks that memory is available before it is allocated. An allocation that fails ends the
//! process, and an allocation that the system cannot keep gets the process killed.

use regard::Error;

/// Below this size memory is not checked: every machine has it, and the check takes longer than a
/// small case.
const UNASKED: u64 = 256 << 20;

/// An error if there is no room for `bytes` more bytes.
///
/// # Errors
/// The amount of memory, its purpose, and the available amount.
pub fn expect_room(what: &str, bytes: u64) -> Result<(), Error> {
    if bytes < UNASKED {
        return Ok(());
    }
    let refused = |allowed: String| {
        Err(Error::argument("memory", format!("{} for {what}", size(bytes)), allowed))
    };
    if let Some(free) = free()
        && bytes > free
    {
        return refused(format!("at most {}, which is what there is", size(free)));
    }
    // A trial allocation finds limits that no file shows: a limit of the process, or a system that
    // does not overcommit. Nothing is touched.
    let mut probe = Vec::<u8>::new();
    let granted = usize::try_from(bytes).is_ok_and(|bytes| probe.try_reserve_exact(bytes).is_ok());
    std::hint::black_box(&mut probe);
    if granted { Ok(()) } else { refused("as much as the system gives to this process".into()) }
}

/// A number of bytes in the unit that suits it.
fn size(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut number, mut unit) = (bytes as f64, 0);
    while number >= 1024.0 && unit + 1 < units.len() {
        number /= 1024.0;
        unit += 1;
    }
    format!("{number:.1} {}", units[unit])
}

/// Bytes that this process can still take, as far as the system reports it (Linux): memory that is
/// free or can be freed, and no more than its control group may have.
pub fn free() -> Option<u64> {
    let file = |path: &str| std::fs::read_to_string(path).ok();
    let free = file("/proc/meminfo").and_then(|text| available(&text));
    let groups = file("/proc/self/cgroup").unwrap_or_default();
    let limits =
        limit_files(&groups).into_iter().filter_map(|path| file(&path)?.trim().parse().ok());
    free.into_iter().chain(limits).min()
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The files that may limit the control groups of `/proc/self/cgroup`, from the innermost group to
/// the root: in a container the root is the container's.
fn limit_files(groups: &str) -> Vec<String> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, name) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|controller| controller == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let mut path = path.trim_end_matches('/');
        loop {
            files.push(format!("{root}{path}/{name}"));
            let Some((parent, _)) = path.rsplit_once('/') else { break };
            path = parent;
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_memory_is_refused() {
        assert_eq!(expect_room("nothing", 0), Ok(()));
        for bytes in [1 << 60, u64::MAX] {
            let error = expect_room("a test", bytes).unwrap_err().to_string();
            let start = format!("`memory` is {} for a test; allowed: ", size(bytes));
            assert!(error.starts_with(&start), "{error}");
        }
        assert_eq!(
            [512, 1536, 3 << 30, u64::MAX].map(size),
            ["512.0 bytes", "1.5 KiB", "3.0 GiB", "16.0 EiB"]
        );
    }

    #[test]
    fn proc_meminfo_is_parsed() {
        let meminfo = "MemTotal:       32 kB\nMemFree:        1 kB\nMemAvailable:   7 kB\n";
        assert_eq!((available(meminfo), available("MemTotal: 1 kB\n")), (Some(7 << 10), None));
        let groups = "4:cpu,memory:/a/b\n3:cpuset:/\n0::/c\n";
        let expected = [
            "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/c/memory.max",
            "/sys/fs/cgroup/memory.max",
        ];
        assert_eq!(limit_files(groups), expected);
        assert_eq!(limit_files("0::/\n"), ["/sys/fs/cgroup/memory.max"]);
        assert!(!cfg!(target_os = "linux") || free().is_some());
    }
}
