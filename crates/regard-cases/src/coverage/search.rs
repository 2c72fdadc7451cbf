//! The search for cases: the features that a kernel accepts, and few cases that cover them.

use super::feature::{Feature, Features, add, features};
use super::{Backend, CoverageCase, Subject};
use crate::Spec;
use crate::noise::Noise;
use regard::ListEntries;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum features that a case combines, besides the features of its shape. With more, one feature
/// may hide the defects of another.
const MAX_ADDED: usize = 8;

/// Features that may make a kernel run, or that another feature may need: tried beside one or two
/// features that lead nowhere by themselves.
const ENABLERS: [Feature; 13] = [
    Feature::Causal,
    Feature::RaggedQueries,
    Feature::Softcap,
    Feature::Unaligned,
    Feature::MaskBool,
    Feature::MaskF16,
    Feature::PagesSmall,
    Feature::OutF32,
    Feature::PagesOdd,
    Feature::BatchInvariant,
    Feature::BlockCache,
    Feature::FloatCache,
    Feature::Lse,
];

/// The cases for one kernel.
#[derive(Debug, Clone)]
pub struct Coverage {
    /// The kernel.
    pub subject: Subject,
    /// A case per feature that the kernel accepts, then pairs.
    pub cases: Vec<CoverageCase>,
    /// Features without a case, with the reason.
    pub not_accepted: BTreeMap<Feature, String>,
    /// Pairs of accepted features that no problem has that selects the kernel, with the reason.
    pub pairs_not_accepted: BTreeMap<(Feature, Feature), String>,
    /// Pairs that some problem has that selects the kernel.
    pub accepted_pairs: BTreeSet<(Feature, Feature)>,
}

/// The features of a kernel that some cases cover.
#[derive(Debug, Clone, Default)]
pub struct Covered {
    /// Cases that have each feature.
    pub features: BTreeMap<Feature, usize>,
    /// Cases that have each pair of features.
    pub pairs: BTreeMap<(Feature, Feature), usize>,
}

impl Covered {
    /// Counts a case.
    pub fn add(&mut self, case: &CoverageCase) {
        for feature in case.features.iter() {
            *self.features.entry(feature).or_default() += 1;
        }
        for pair in case.features.pairs() {
            *self.pairs.entry(pair).or_default() += 1;
        }
    }
}

impl Coverage {
    /// The features that the kernel accepts.
    pub fn accepted(&self) -> Features {
        let kept =
            Feature::ALL.into_iter().filter(|feature| !self.not_accepted.contains_key(feature));
        kept.fold(Features::default(), Features::with)
    }

    /// The features that some cases cover.
    pub fn covered<'a>(&self, cases: impl Iterator<Item = &'a CoverageCase>) -> Covered {
        let mut covered = Covered::default();
        cases.for_each(|case| covered.add(case));
        covered
    }

    /// Accepted features and pairs without a case among the cases that `covered` has counted.
    pub fn empty(&self, covered: &Covered) -> (Vec<Feature>, Vec<(Feature, Feature)>) {
        let features =
            self.accepted().iter().filter(|feature| !covered.features.contains_key(feature));
        let pairs = self.accepted_pairs.iter().filter(|pair| !covered.pairs.contains_key(pair));
        (features.collect(), pairs.copied().collect())
    }
}

/// The base that features are added to: a shape, head dims, a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Base {
    shape: usize,
    dims: usize,
    types: usize,
    machine: usize,
}

/// A base and the features added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Recipe {
    base: Base,
    pub(super) added: Features,
    seed: u64,
}

/// The same case with a feature less, if the kernel still runs it.
pub(super) fn without(
    case: &CoverageCase,
    feature: Feature,
    backend: &dyn Backend,
    subject: &Subject,
) -> Option<CoverageCase> {
    let mut search = Search { backend, subject, bases: Vec::new(), seen: BTreeMap::new() };
    let recipe = Recipe { added: case.recipe.added.without(feature), ..case.recipe };
    search.case(&recipe, None, 0, &mut BTreeSet::new())
}

enum Outcome {
    /// The kernel runs; the case has these features.
    Runs(Features),
    /// Another does, or nothing, for that reason.
    Instead(String),
    /// There is no such problem.
    Impossible,
}

struct Search<'a> {
    backend: &'a dyn Backend,
    subject: &'a Subject,
    bases: Vec<Base>,
    /// Pairs that were seen, and the recipe that has them. A feature alone is a pair with itself.
    seen: BTreeMap<(Feature, Feature), Recipe>,
}

/// Whether some problem selects a kernel: the first step of [`cover`].
pub fn is_selected(backend: &dyn Backend, subject: &Subject) -> bool {
    let mut search = Search { backend, subject, bases: Vec::new(), seen: BTreeMap::new() };
    search.bases().any(|base| search.is_taken(base))
}

/// The cases for a kernel. The same every time.
pub fn cover(backend: &dyn Backend, subject: &Subject) -> Coverage {
    let mut search = Search { backend, subject, bases: Vec::new(), seen: BTreeMap::new() };
    search.find_bases();
    let mut alone = BTreeMap::new();
    let mut not_accepted = BTreeMap::new();
    for feature in Feature::ALL {
        match search.find(Features::from_list(&[feature])) {
            Ok(recipe) => {
                alone.insert(feature, recipe);
            }
            Err(reason) => {
                not_accepted.insert(feature, reason);
            }
        }
    }
    // A search for one feature may come by another that its own search has not found.
    for (&(a, b), recipe) in &search.seen {
        if a == b {
            alone.entry(a).or_insert(*recipe);
        }
    }
    let accepted = alone.keys().fold(Features::default(), |set, &feature| set.with(feature));
    let mut pairs_not_accepted = BTreeMap::new();
    for (a, b) in accepted.pairs() {
        if !search.seen.contains_key(&(a, b))
            && let Err(reason) = search.find(Features::from_list(&[a, b]))
        {
            pairs_not_accepted.insert((a, b), reason);
        }
    }
    let cases = search.cases(&alone);
    not_accepted.retain(|feature, _| !search.seen.contains_key(&(*feature, *feature)));
    pairs_not_accepted.retain(|pair, _| !search.seen.contains_key(pair));
    let accepted_pairs = search.seen.keys().filter(|(a, b)| a != b).copied().collect();
    Coverage { subject: subject.clone(), cases, not_accepted, pairs_not_accepted, accepted_pairs }
}

impl Search<'_> {
    /// All bases.
    fn bases(&self) -> impl Iterator<Item = Base> + use<> {
        let Subject { shapes, dims, types, machines, .. } = self.subject;
        let (machines, dims, types) = (machines.len(), dims.len(), types.len());
        let places = (0..shapes.len())
            .flat_map(move |shape| (0..machines).map(move |machine| (shape, machine)));
        places.flat_map(move |(shape, machine)| {
            let of_place =
                (0..dims).flat_map(move |dims| (0..types).map(move |types| (dims, types)));
            of_place.map(move |(dims, types)| Base { shape, dims, types, machine })
        })
    }

    /// Whether the kernel runs on a base, by itself or with an enabler.
    fn is_taken(&mut self, base: Base) -> bool {
        // Ragged queries bring both prefill and decode; the other needed features come on top.
        let alone = ENABLERS.iter().map(|&enabler| Features::from_list(&[enabler]));
        let ragged = alone.clone().map(|added| added.with(Feature::RaggedQueries));
        let mut tried = std::iter::once(Features::default()).chain(alone).chain(ragged);
        tried.any(|added| matches!(self.attempt(&recipe(base, added)), Outcome::Runs(_)))
    }

    /// The bases on which the kernel runs, by itself or with an enabler.
    fn find_bases(&mut self) {
        for base in self.bases() {
            if self.is_taken(base) {
                self.bases.push(base);
            }
        }
    }

    /// The description that a recipe makes.
    fn make(&self, recipe: &Recipe) -> Option<(Spec, bool)> {
        let Base { shape, dims, types, .. } = recipe.base;
        let [q_len, query_heads, kv_heads, kv_len, sequences] = self.subject.shapes[shape];
        let (head_dim, value_dim) = self.subject.dims[dims];
        let base =
            Spec::new("").lengths(&vec![(q_len, kv_len); sequences]).heads(query_heads, kv_heads);
        let mut spec = base.dims(head_dim, value_dim).dtype(self.subject.types[types].queries);
        spec.cache = self.subject.types[types].cache;
        spec.values = self.subject.values;
        spec.window = self.subject.window;
        if self.subject.lists {
            spec = add(Feature::KeyLists, spec, self.subject.page_keys)?;
        }
        if self.subject.page_lists {
            spec.lists.as_mut()?.of = ListEntries::Pages;
        }
        spec.seed = recipe.seed;
        spec.page_seed = recipe.seed;
        for feature in recipe.added.without(Feature::Lse).iter() {
            spec = add(feature, spec, self.subject.page_keys)?;
        }
        let lse = recipe.added.has(Feature::Lse);
        let has = features(&spec, lse);
        (has.has_all(recipe.added) && spec.clone().legal() == spec).then_some((spec, lse))
    }

    /// Tries a recipe, and remembers its features and pairs.
    fn attempt(&mut self, recipe: &Recipe) -> Outcome {
        let Some((spec, lse)) = self.make(recipe) else { return Outcome::Impossible };
        let machine = &self.subject.machines[recipe.base.machine];
        let ran = match self.backend.runs(&spec, lse, machine) {
            Ok(ran) => ran,
            Err(error) => return Outcome::Instead(error.to_string()),
        };
        let Some((_, of_run)) = ran.iter().find(|(name, _)| *name == self.subject.name) else {
            let names: Vec<_> = ran.into_iter().map(|(name, _)| name).collect();
            return Outcome::Instead(format!("{} instead", names.join(", ")));
        };
        let exact = self.subject.dims.first() == Some(&(spec.head_dim, spec.value_dim));
        let dims = if exact { Feature::ExactDims } else { Feature::PaddedDims };
        let all = features(&spec, lse).and(*of_run).with(dims);
        for pair in all.pairs().chain(all.iter().map(|feature| (feature, feature))) {
            self.seen.entry(pair).or_insert(*recipe);
        }
        Outcome::Runs(all)
    }

    /// A recipe with these features, as few others as possible, and on the cheapest base; or the
    /// reason why there is none.
    fn find(&mut self, wanted: Features) -> Result<Recipe, String> {
        let addable = |feature: &Feature| !is_of_run(*feature);
        let added = with_needed(
            wanted.iter().filter(addable).fold(Features::default(), Features::with),
            wanted,
        );
        let mut reason = None;
        let enablers = std::iter::once(None).chain(ENABLERS.into_iter().map(Some));
        for enabler in enablers {
            let added = enabler.map_or(added, |enabler| added.with(enabler));
            for i in 0..self.bases.len() {
                let recipe = recipe(self.bases[i], added);
                match self.attempt(&recipe) {
                    Outcome::Runs(has) if has.has_all(wanted) => return Ok(recipe),
                    Outcome::Instead(why) => drop(reason.get_or_insert(why)),
                    Outcome::Runs(_) | Outcome::Impossible => {}
                }
            }
        }
        Err(reason.unwrap_or_else(|| "no such problem".into()))
    }

    /// Each feature alone, then all pairs.
    fn cases(&mut self, alone: &BTreeMap<Feature, Recipe>) -> Vec<CoverageCase> {
        let (mut cases, mut made) = (Vec::new(), Vec::new());
        let mut covered = BTreeSet::new();
        for (&feature, recipe) in alone {
            if !made.contains(recipe) {
                made.push(*recipe);
                cases.extend(self.case(recipe, Some(feature), made.len(), &mut covered));
            }
        }
        // Trying recipes may show pairs that no search has found: the rest to cover can grow on the
        // way.
        while let Some(pair) = self.first_left(&covered) {
            let seen = self.seen[&pair];
            let mut recipe = Recipe { seed: made.len() as u64 + 1, ..seen };
            let both = Features::from_list(&[pair.0, pair.1]);
            if !matches!(self.attempt(&recipe), Outcome::Runs(has) if has.has_all(both)) {
                recipe = seen;
            }
            self.extend(&mut recipe, &covered);
            made.push(recipe);
            cases.extend(self.case(&recipe, None, made.len(), &mut covered));
            covered.insert(pair);
        }
        cases
    }

    /// A pair that has been seen and is not covered.
    fn first_left(&self, covered: &BTreeSet<(Feature, Feature)>) -> Option<(Feature, Feature)> {
        self.seen.keys().find(|pair| pair.0 != pair.1 && !covered.contains(pair)).copied()
    }

    /// Adds features that cover the rest, in an order that differs from case to case.
    fn extend(&mut self, recipe: &mut Recipe, covered: &BTreeSet<(Feature, Feature)>) {
        let Outcome::Runs(mut has) = self.attempt(recipe) else { return };
        let order = Noise::new(recipe.seed, &[0x6f72_6465]).permutation(Feature::ALL.len());
        for feature in order.into_iter().map(|i| Feature::ALL[i]) {
            if recipe.added.len() >= MAX_ADDED {
                return;
            }
            if has.has(feature) || is_of_run(feature) {
                continue;
            }
            let gains = has.iter().any(|other| {
                let pair = (other.min(feature), other.max(feature));
                self.seen.contains_key(&pair) && !covered.contains(&pair)
            });
            let more = Recipe { added: recipe.added.with(feature), ..*recipe };
            if gains
                && let Outcome::Runs(now) = self.attempt(&more)
                && now.has_all(has)
            {
                (*recipe, has) = (more, now);
            }
        }
    }

    /// The case of a recipe; counts its features and pairs as covered.
    fn case(
        &mut self,
        recipe: &Recipe,
        alone: Option<Feature>,
        number: usize,
        covered: &mut BTreeSet<(Feature, Feature)>,
    ) -> Option<CoverageCase> {
        let Outcome::Runs(features) = self.attempt(recipe) else { return None };
        let (mut spec, lse) = self.make(recipe)?;
        covered.extend(features.pairs());
        show_all_blocks(&mut spec);
        spec.name = format!("coverage/{}/{number}-{}", self.subject.name, recipe.added);
        let machine = self.subject.machines[recipe.base.machine].clone();
        Some(CoverageCase { spec, lse, machine, features, alone, recipe: *recipe })
    }
}

/// Changes the seed until the mask leaves some block alone and hides a part of another, if it has
/// several blocks and such a seed is found. Kernels treat such blocks differently.
fn show_all_blocks(spec: &mut Spec) {
    let Some(mask) = spec.mask else { return };
    let seeds = (0..32).map(|i| spec.seed + 1000 * i);
    let best = seeds.max_by_key(|&seed| {
        let kinds = Spec { seed, ..spec.clone() }.mask_blocks(&mask);
        let [wanted, next] = if spec.seed.is_multiple_of(2) { [1, 2] } else { [2, 1] };
        (kinds.contains(&wanted), kinds.contains(&next), std::cmp::Reverse(seed))
    });
    spec.seed = best.unwrap_or(spec.seed);
}

/// The added features and the prerequisites of the wanted ones: pages, a mask, ragged queries.
fn with_needed(added: Features, wanted: Features) -> Features {
    use Feature::*;
    let any = |of: &[Feature]| of.iter().any(|&feature| wanted.has(feature));
    let mut added = added;
    if any(&[HeadMajorPages, OnePool, SlotLists, SecondLists, PageLists, PageNumbers])
        && !any(&[PagesLarge, PagesSmall, PagesOdd])
    {
        added = added.with(PagesSmall);
    }
    if any(&[HeadLists, ListCounts, SlotLists, SecondLists, PageLists, PageNumbers]) {
        added = added.with(KeyLists);
    }
    if any(&[MaskBroadcast]) && !any(&[MaskBool, MaskF32, MaskF16, MaskBf16]) {
        added = added.with(MaskBool);
    }
    if any(&[Beside]) {
        added = added.with(RaggedQueries);
    }
    added
}

fn recipe(base: Base, added: Features) -> Recipe {
    Recipe { base, added, seed: 1 }
}

/// Whether a feature comes with a base or with the kernel that runs, and is not added.
fn is_of_run(feature: Feature) -> bool {
    use Feature::*;
    matches!(
        feature,
        ExactDims
            | PaddedDims
            | SeveralTokens
            | GroupedHeads
            | ManyKeys
            | Beside
            | Combine
            | HeadParts
            | KeySplits
    )
}
