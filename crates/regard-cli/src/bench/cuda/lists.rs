//! Lists of keys for a GPU: scattered over each sequence, and different from row to row.

use super::super::shapes::Target;
use regard::{Error, KvStorage, ListEntries, Problem};
use regard_cases::{Array, Data};

/// Steps from entry to entry, in keys or pages: primes, one of which does not divide a length.
const STEPS: [usize; 2] = [7919, 104_729];

/// The lists of a target's rows, as [`regard::Attention`] has them.
#[derive(Default)]
pub struct Lists {
    pub key_indices: Option<Array>,
    pub indices_are_slots: bool,
    pub page_indices: Option<Array>,
}

impl Lists {
    /// Makes them, for rows of `query_lens` per sequence and the pages of `table`.
    ///
    /// # Errors
    /// If the target asks for lists that are not measured on a GPU.
    pub fn new(
        target: &Target,
        query_lens: &[usize],
        table: Option<&Array>,
    ) -> Result<Lists, Error> {
        let problem = &target.problem;
        let Some(lists) = problem.key_lists else { return Ok(Lists::default()) };
        if lists.second.is_some() || lists.entries == ListEntries::NumberedPages {
            let allowed = "lists of positions, slots or pages without numbers, on a GPU";
            return Err(Error::argument("shape", "with other lists", allowed));
        }
        let pages = Pages::new(problem, table);
        let heads = if lists.per_head { problem.kv_heads } else { 1 };
        if lists.entries == ListEntries::Pages {
            let count = lists.len.div_ceil(pages.block_size);
            let mut blocks = Vec::new();
            for list in 0..heads * problem.batch {
                let entry = |page| pages.block(list % problem.batch, page);
                blocks.extend(scattered(list, count, pages.per_sequence).map(entry));
            }
            let page_indices = Some(Array::new(blocks, &[heads, problem.batch, count])?);
            return Ok(Lists { page_indices, ..Lists::default() });
        }
        let of_slots = lists.entries == ListEntries::Slots;
        let mut entries = Vec::new();
        let rows = query_lens.iter().enumerate().flat_map(|(i, &len)| (0..len).map(move |_| i));
        for (row, sequence) in rows.enumerate() {
            for head in 0..heads {
                let keys = scattered(row * heads + head, lists.len, problem.kv_len);
                let entry = |key| if of_slots { pages.slot(sequence, key) } else { key as i32 };
                entries.extend(keys.map(entry));
            }
        }
        let shape = [query_lens.iter().sum(), heads, lists.len];
        let key_indices = Some(Array::new(entries, &shape)?);
        Ok(Lists { key_indices, indices_are_slots: of_slots, page_indices: None })
    }
}

/// `count` numbers below `length`, all different if `count` is at most `length`.
fn scattered(list: usize, count: usize, length: usize) -> impl Iterator<Item = usize> {
    let step = STEPS.into_iter().find(|step| !length.is_multiple_of(*step)).unwrap_or(1);
    let start = list * STEPS[1];
    (0..count).map(move |entry| (start + entry * step) % length.max(1))
}

/// The pages of each sequence.
struct Pages<'a> {
    blocks: &'a [i32],
    per_sequence: usize,
    block_size: usize,
}

impl<'a> Pages<'a> {
    /// The pages of a block table; keys that are not paged have none.
    fn new(problem: &Problem, table: Option<&'a Array>) -> Pages<'a> {
        let block_size = match problem.keys {
            KvStorage::Paged { block_size } => block_size,
            _ => 1,
        };
        match table.map(|table| (table.data(), table.shape())) {
            Some((Data::I32(blocks), &[_, per_sequence])) => {
                Pages { blocks, per_sequence, block_size }
            }
            _ => Pages { blocks: &[], per_sequence: 0, block_size },
        }
    }

    fn block(&self, sequence: usize, page: usize) -> i32 {
        self.blocks[sequence * self.per_sequence + page]
    }

    fn slot(&self, sequence: usize, key: usize) -> i32 {
        let block = self.block(sequence, key / self.block_size) as usize;
        (block * self.block_size + key % self.block_size) as i32
    }
}
