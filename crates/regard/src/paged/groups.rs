//! Search for the sequences of a step that share their first pages.

/// Sequences in the order of their block tables: sequences that share pages are neighbours.
#[derive(Debug, Clone, Default)]
pub(super) struct PrefixFinder {
    order: Vec<usize>,
    /// Leading pages that a sequence shares with its neighbour before it in that order.
    shared: Vec<usize>,
}

/// The groups of a step: one for each, in the order of the batch.
#[derive(Debug, Clone, Default)]
pub(super) struct PrefixGroups {
    /// The group of each sequence, -1 for none.
    pub groups: Vec<i32>,
    /// The keys that the sequences of each group share; 0 for unused groups.
    pub lens: Vec<i32>,
}

/// The tables of a step.
pub(super) struct BatchTables<'a> {
    /// `[B, width]`.
    pub table: &'a [i32],
    pub width: usize,
    pub kv_lens: &'a [i32],
    pub block_size: usize,
}

impl BatchTables<'_> {
    fn row(&self, sequence: usize) -> &[i32] {
        &self.table[sequence * self.width..][..self.width]
    }

    /// Leading pages that two sequences share, without released and missing pages.
    fn shared(&self, a: usize, b: usize) -> usize {
        let pages = self.row(a).iter().zip(self.row(b));
        pages.take_while(|(a, b)| a == b && **a >= 0).count()
    }
}

impl PrefixFinder {
    /// Finds groups, one level of them: the groups that save the most page reads. Sequences of a
    /// group share more with each other than with others, or the larger group saves more.
    pub fn find(&mut self, tables: &BatchTables, found: &mut PrefixGroups) {
        let batch = tables.kv_lens.len();
        found.groups.clear();
        found.groups.resize(batch, -1);
        found.lens.clear();
        self.order.clear();
        self.order.extend(0..batch);
        self.order.sort_unstable_by(|&a, &b| tables.row(a).cmp(tables.row(b)));
        self.shared.clear();
        self.shared.push(0);
        self.shared.extend(self.order.windows(2).map(|pair| tables.shared(pair[0], pair[1])));
        if batch > 1 {
            self.split(tables, 0, batch, found);
        }
        // As many places as there are sequences, for buffers of one layout.
        found.lens.resize(batch.max(1), 0);
    }

    /// Groups the sequences from `start` to `end` of the order.
    fn split(&self, tables: &BatchTables, start: usize, end: usize, found: &mut PrefixGroups) {
        if end - start < 2 {
            return;
        }
        let pages = self.pages(start, end);
        if pages > 0 && self.spared(start, end) <= (end - start - 1) * pages {
            let members = &self.order[start..end];
            let shortest = members.iter().map(|&index| tables.kv_lens[index]).min().unwrap_or(0);
            let len = shortest.min(i32::try_from(pages * tables.block_size).unwrap_or(i32::MAX));
            members.iter().for_each(|&index| found.groups[index] = found.lens.len() as i32);
            found.lens.push(len);
            return;
        }
        let mut first = start;
        for next in start + 1..=end {
            if next == end || self.shared[next] == pages {
                self.split(tables, first, next, found);
                first = next;
            }
        }
    }

    /// Leading pages that all of them share.
    fn pages(&self, start: usize, end: usize) -> usize {
        self.shared[start + 1..end].iter().copied().min().unwrap_or(0)
    }

    /// Page reads that the best groups of these sequences save.
    fn spared(&self, start: usize, end: usize) -> usize {
        if end - start < 2 {
            return 0;
        }
        let pages = self.pages(start, end);
        let (mut apart, mut first) = (0, start);
        for next in start + 1..=end {
            if next == end || self.shared[next] == pages {
                apart += self.spared(first, next);
                first = next;
            }
        }
        apart.max((end - start - 1) * pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(rows: &[[i32; 4]], kv_lens: &[i32]) -> (Vec<i32>, Vec<i32>) {
        let table: Vec<i32> = rows.iter().flatten().copied().collect();
        let tables = BatchTables { table: &table, width: 4, kv_lens, block_size: 4 };
        let mut found = PrefixGroups::default();
        PrefixFinder::default().find(&tables, &mut found);
        found.lens.retain(|&len| len > 0);
        (found.groups, found.lens)
    }

    #[test]
    fn sequences_that_share_pages_are_found() {
        let none = [[1, 2, -1, -1], [3, -1, -1, -1], [4, 5, -1, -1]];
        assert_eq!(groups(&none, &[8, 2, 7]), (vec![-1; 3], vec![]));
        let two = [[1, 2, 9, -1], [5, 6, -1, -1], [1, 2, 8, -1], [5, 7, -1, -1]];
        let (found, lens) = groups(&two, &[10, 8, 11, 6]);
        assert_eq!((found[0], found[1]), (found[2], found[3]));
        assert_ne!(found[0], found[1]);
        assert_eq!((lens[found[0] as usize], lens[found[1] as usize]), (8, 4));
    }

    #[test]
    fn the_groups_that_spare_most_win() {
        // Three pages of two sequences spare 3; one page of all four spares 3 too: one group.
        let rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, -1, -1], [1, 7, -1, -1]];
        assert_eq!(groups(&rows, &[16, 16, 8, 8]), (vec![0; 4], vec![4]));
        // Two groups of two sequences spare 2 + 2 pages, one page of all four 3.
        let rows = [[1, 2, 4, -1], [1, 3, 6, -1], [1, 2, 5, -1], [1, 3, 7, -1]];
        let (found, lens) = groups(&rows, &[12; 4]);
        assert_eq!((found, lens), (vec![0, 1, 0, 1], vec![8, 8]));
    }

    #[test]
    fn released_pages_are_shared_by_nobody() {
        let rows = [[-1, 2, 4, -1], [-1, 2, 5, -1]];
        assert_eq!(groups(&rows, &[12, 12]), (vec![-1, -1], vec![]));
        // A page in use up to the middle: no more keys than the shortest has.
        let rows = [[3, 4, -1, -1], [3, 4, -1, -1]];
        assert_eq!(groups(&rows, &[7, 6]), (vec![0, 0], vec![6]));
    }
}
