//! The facts of a problem in the shapes of its keys.

use super::KvStorage;

/// The storage of keys, by the shapes of `k`, `block_table` and `cu_seqlens_k`.
pub(super) struct KeyShape {
    pub storage: KvStorage,
    /// Keys of the longest sequence.
    pub max_len: usize,
}
