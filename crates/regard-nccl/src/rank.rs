//! A rank: a device, and the transport that joins it to the others.

use crate::device::Device;
use crate::transport::Transport;
use regard::{Error, Problem};

/// One rank of a group.
#[derive(Debug)]
pub struct Rank<D, T> {
    /// The device that it computes on.
    pub device: D,
    /// The transport by which it reaches the others.
    pub transport: T,
}

/// Bytes of a description on the wire.
const DESCRIPTION_BYTES: usize = 4096;

/// One fact of a problem, by the name of the argument.
pub(crate) type Term = (&'static str, String);

impl<D: Device, T: Transport<Queue = D::Queue>> Rank<D, T> {
    /// Waits for the kernels that are queued.
    ///
    /// # Errors
    /// As [`Transport::wait`]: after the timeout, or if a rank or the device fails.
    pub fn wait(&self) -> Result<(), Error> {
        self.transport.wait(self.device.compute())
    }

    /// An error on every rank that names the first term in which a rank differs from rank 0.
    pub(crate) fn agree(&self, terms: &[Term]) -> Result<(), Error> {
        let text: String = terms.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        let mut bytes = text.into_bytes();
        bytes.resize(DESCRIPTION_BYTES, 0);
        let all = self.transport.all_gather_host(self.device.compute(), &bytes)?;
        let texts: Vec<String> = all
            .iter()
            .map(|bytes| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned())
            .collect();
        for (rank, text) in texts.iter().enumerate() {
            let mut lines = texts[0].lines().zip(text.lines());
            let Some((first, other)) = lines.find(|(first, other)| first != other) else {
                continue;
            };
            let split = |line: &str| -> (String, String) {
                let (name, value) = line.split_once('=').unwrap_or((line, ""));
                (name.to_owned(), value.to_owned())
            };
            let ((name, first), (_, other)) = (split(first), split(other));
            let found = format!("{first} on rank 0 and {other} on rank {rank}");
            return Err(Error::argument(name, found, "the same on every rank"));
        }
        Ok(())
    }
}

/// The terms of a problem that all ranks share, apart from the number of keys.
pub(crate) fn terms(operation: &str, problem: &Problem) -> Vec<Term> {
    let Problem { variant, .. } = problem;
    vec![
        ("operation", operation.to_owned()),
        ("batch", problem.batch.to_string()),
        ("query_heads", problem.query_heads.to_string()),
        ("kv_heads", problem.kv_heads.to_string()),
        ("head_dim", problem.head_dim.to_string()),
        ("value_dim", problem.value_dim.to_string()),
        ("query_len", problem.query_len.to_string()),
        ("queries", format!("{:?}", problem.queries)),
        ("dtype", problem.dtype.to_string()),
        ("key_dtype", problem.key_dtype.to_string()),
        ("value_dtype", problem.value_dtype.to_string()),
        ("values", format!("{:?}", problem.values)),
        ("out_dtype", problem.out_dtype.to_string()),
        ("causal", variant.causal.to_string()),
        ("window", format!("{:?}", variant.window)),
        ("chunk", format!("{:?}", variant.chunk)),
        ("softcap", variant.softcap.to_string()),
        ("alibi_slopes", variant.alibi.to_string()),
        ("sinks", variant.sinks.to_string()),
        ("mask", format!("{:?}", variant.mask)),
        ("tree_mask", variant.tree.to_string()),
        ("key_positions", format!("{:?}", variant.key_positions)),
        ("key_indices", format!("{:?}", problem.key_lists)),
        ("lse", problem.lse.to_string()),
        ("batch_invariant", problem.batch_invariant.to_string()),
    ]
}
