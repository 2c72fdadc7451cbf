//! Beginnings that requests have in common, so that they are computed and stored once.

use regard::Error;
use regard::paged::{PageAllocator, SequenceId};
use std::collections::VecDeque;

/// Tokens at the start that two texts share.
pub(crate) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Prompts of finished requests, kept in the cache for the next ones as long as no request needs
/// their pages; oldest first.
#[derive(Default)]
pub(crate) struct Retained {
    prompts: VecDeque<(Vec<u32>, SequenceId)>,
}

/// Prompts that are kept at most: each is looked at for every new request.
const MOST: usize = 64;

impl Retained {
    /// Keeps a sequence that holds just these tokens; frees it if they are kept already.
    pub fn keep(
        &mut self,
        pages: &mut PageAllocator,
        tokens: Vec<u32>,
        sequence: SequenceId,
    ) -> Result<(), Error> {
        if self.prompts.iter().any(|(kept, _)| kept.starts_with(&tokens)) {
            return pages.free(sequence);
        }
        self.prompts.push_back((tokens, sequence));
        if self.prompts.len() > MOST {
            self.release_oldest(pages)?;
        }
        Ok(())
    }

    /// Gives up the oldest; false if there is none.
    pub fn release_oldest(&mut self, pages: &mut PageAllocator) -> Result<bool, Error> {
        match self.prompts.pop_front() {
            Some((_, sequence)) => pages.free(sequence).map(|()| true),
            None => Ok(false),
        }
    }

    /// The kept prompts.
    pub fn iter(&self) -> impl Iterator<Item = (&[u32], SequenceId)> {
        self.prompts.iter().map(|(tokens, sequence)| (tokens.as_slice(), *sequence))
    }
}
