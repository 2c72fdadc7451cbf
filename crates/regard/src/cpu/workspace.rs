//! The memory that runs leave partial results in.

use crate::error::Error;
use crate::plan::Plan;
use std::fmt;

/// A workspace in the host's memory. Any plan that it is large enough for can use it, one run at a
/// time.
#[derive(Default)]
pub struct Workspace {
    memory: Vec<u8>,
}

impl Workspace {
    /// Takes memory as a workspace. It needs no initialization and no alignment.
    pub fn new(memory: Vec<u8>) -> Workspace {
        Workspace { memory }
    }

    /// Allocates a workspace of exactly the size that the plan needs.
    ///
    /// # Errors
    /// If memory does not suffice.
    pub fn for_plan(plan: &Plan) -> Result<Workspace, Error> {
        let bytes = plan.workspace_bytes();
        let mut memory = Vec::new();
        if memory.try_reserve_exact(bytes).is_err() {
            let found = format!("of {bytes} bytes");
            return Err(Error::argument("workspace", found, "what fits in memory"));
        }
        memory.resize(bytes, 0);
        Ok(Workspace { memory })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// The memory again.
    pub fn into_memory(self) -> Vec<u8> {
        self.memory
    }

    /// The memory, for a run.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workspace({} bytes)", self.memory.len())
    }
}
