//! A problem's shape in one line of text, as `regard plan --shape` takes it.

use regard::{
    CACHE_DTYPES, DType, Error, KeyLayout, KeyLists, KvStorage, ListEntries, Problem, QueryStorage,
    Values, Variant, Window,
};
use regard_cases::Granularity;

/// Every key with its meaning: for the help, and for the message about an unknown one.
const KEYS: [(&str, &str); 36] = [
    ("b", "sequences (1)"),
    ("hq", "query heads"),
    ("hkv", "key/value heads (as hq)"),
    ("d", "head dim of queries and keys"),
    ("dv", "head dim of values (as d)"),
    ("latent", "values are the first dv dims of keys"),
    ("rotary", "the last N of the d dims of keys are in a tensor of their own (with latent)"),
    ("lq", "query tokens of a sequence"),
    ("lk", "keys of a sequence (as lq)"),
    ("dtype", "f32, f16 or bf16 (f32)"),
    ("kv", "storage of keys and values: f32, f16, bf16, e4m3, e5m2, i8, q8_0 or q4_0 (as dtype)"),
    ("k", "storage of keys alone"),
    ("v", "storage of values alone"),
    ("scale", "a scale per tensor, head, page-head or token-head, of e4m3, e5m2 and i8 (head)"),
    ("out", "type of the output: the dtype, or f32 (as dtype)"),
    ("causal", "keys up to the query's position"),
    ("window", "LEFT,RIGHT: keys around it, each a number or none"),
    ("chunk", "chunked attention: positions per chunk"),
    ("shard", "keys at positions of their own: contiguous, or round-robin over devices"),
    ("softcap", "scores are capped"),
    ("alibi", "scores fall with distance"),
    ("sinks", "a sink logit per head"),
    ("mask", "type of a mask: bool, f32, f16 or bf16"),
    ("tree", "a packed tree mask over the new tokens"),
    ("page", "paged keys: slots per block"),
    ("list", "entries in each row's list of the keys that it attends to"),
    ("list-heads", "a list per row and key/value head"),
    ("slots", "lists hold physical slots of the pool"),
    ("second-list", "entries in each row's second list, into a second cache (with slots)"),
    ("list-pages", "lists hold pages of the pool, for the rows of a sequence"),
    ("list-numbers", "lists hold pages with their numbers in the sequence"),
    ("groups", "prefix groups, at most: sequences that share their first pages"),
    ("shared", "keys that the sequences of each group share (half of them, in whole pages)"),
    ("ragged", "sequences one after the other"),
    ("invariant", "bits independent of the batch"),
    ("lse", "log-sum-exp too"),
];

/// The keys, for `--help`.
pub fn help() -> String {
    let mut text = String::from(
        "The problem as words, each KEY=VALUE or a bare KEY; hq, d and lq are needed:\n\
         \"b=1 hq=32 hkv=8 d=128 lq=1 lk=4096 dtype=bf16 causal window=512,0 page=16\"\n\n",
    );
    for (key, meaning) in KEYS {
        text.push_str(&format!("  {key:<12} {meaning}\n"));
    }
    text
}

/// A problem and how its caches are scaled.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// The problem.
    pub problem: Problem,
    /// The group of codes that share a scale. Plans do not depend on it.
    pub granularity: Granularity,
    /// Keys that the sequences of each prefix group share; likewise.
    pub shared: usize,
}

/// The problem that the words describe, as [`describe`] has it.
///
/// # Errors
/// As [`describe`].
pub fn parse(text: &str) -> Result<Problem, Error> {
    Ok(describe(text)?.problem)
}

/// The problem that the words describe, and the granularity of scales.
///
/// # Errors
/// If a key is unknown, given twice or missing, or its value is not allowed; the message names the
/// key, the value and the allowed values.
pub fn describe(text: &str) -> Result<Described, Error> {
    let mut words = Words { words: Vec::new() };
    for word in text.split_whitespace() {
        let (key, value) = match word.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (word, None),
        };
        if !KEYS.iter().any(|(known, _)| *known == key) {
            let known: Vec<_> = KEYS.iter().map(|(known, _)| *known).collect();
            return Err(Error::argument("shape key", format!("\"{key}\""), known.join(", ")));
        }
        if words.words.iter().any(|(given, _)| *given == key) {
            return Err(Error::argument(key, "given twice", "each key once"));
        }
        words.words.push((key, value));
    }

    let batch = words.number("b")?.unwrap_or(1);
    let query_heads = words.needed("hq")?;
    let head_dim = words.needed("d")?;
    let query_len = words.needed("lq")?;
    let dtype = words.dtype("dtype", &FLOATS)?.unwrap_or(DType::F32);
    let tree = words.flag("tree")?;
    let ragged = words.flag("ragged")?;
    // Values that are a prefix of the keys have the type that follows from theirs.
    let caches: Vec<_> =
        CACHE_DTYPES.into_iter().filter(|&dtype| dtype != DType::Mla656Latent).collect();
    let both = words.dtype("kv", &caches)?;
    let stored = |key: &str| match (words.dtype(key, &caches)?, both) {
        (Some(dtype), Some(_)) => {
            Err(Error::argument(key, format!("{dtype}, given with kv"), "one of the two"))
        }
        (own, both) => Ok(own.or(both).unwrap_or(dtype)),
    };
    let mut problem = Problem {
        batch,
        query_heads,
        kv_heads: words.number("hkv")?.unwrap_or(query_heads),
        head_dim,
        value_dim: words.number("dv")?.unwrap_or(head_dim),
        query_len,
        kv_len: words.number("lk")?.unwrap_or(query_len),
        queries: match ragged {
            true => QueryStorage::Ragged { total: batch.saturating_mul(query_len) },
            false => QueryStorage::Batched,
        },
        keys: match (words.number("page")?, ragged) {
            (Some(block_size), _) => KvStorage::Paged { block_size },
            (None, true) => KvStorage::Ragged,
            (None, false) => KvStorage::Batched,
        },
        dtype,
        key_dtype: stored("k")?,
        value_dtype: stored("v")?,
        values: match words.flag("latent")? {
            true => Values::KeyPrefix,
            false => Values::Separate,
        },
        rotary_dim: words.number("rotary")?.unwrap_or(0),
        out_dtype: words.dtype("out", &FLOATS)?.unwrap_or(dtype),
        variant: Variant {
            // A tree replaces it, as everywhere.
            causal: words.flag("causal")? && !tree,
            window: words.window()?,
            chunk: words.number("chunk")?,
            softcap: words.flag("softcap")?,
            alibi: words.flag("alibi")?,
            sinks: words.flag("sinks")?,
            mask: words.dtype("mask", &MASKS)?,
            tree,
            key_positions: words.key_layout()?,
        },
        key_lists: words.key_lists()?,
        prefix_groups: words.number("groups")?.unwrap_or(0),
        lse: words.flag("lse")?,
        batch_invariant: words.flag("invariant")?,
    };
    if problem.values == Values::KeyPrefix && problem.value_dtype == problem.key_dtype {
        problem.value_dtype = problem.key_dtype.of_prefix(problem.value_dim);
    }
    problem.validate()?;
    let granularity = words.granularity(&problem)?;
    let shared = words.shared(&problem)?;
    Ok(Described { problem, granularity, shared })
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const MASKS: [DType; 4] = [DType::Bool, DType::F32, DType::F16, DType::BF16];

/// The words of a shape: known keys, each once.
struct Words<'a> {
    words: Vec<(&'a str, Option<&'a str>)>,
}

impl<'a> Words<'a> {
    fn get(&self, key: &str) -> Option<Option<&'a str>> {
        self.words.iter().find(|(given, _)| *given == key).map(|(_, value)| *value)
    }

    fn flag(&self, key: &str) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(false),
            Some(None) => Ok(true),
            Some(Some(value)) => {
                Err(Error::argument(key, format!("\"{value}\""), "the bare word, no value"))
            }
        }
    }

    fn number(&self, key: &str) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.and_then(|value| value.parse().ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(key, value, "a whole number")),
        }
    }

    fn needed(&self, key: &str) -> Result<usize, Error> {
        self.number(key)?.ok_or_else(|| Error::argument(key, "missing", format!("{key}=NUMBER")))
    }

    fn dtype(&self, key: &str, allowed: &[DType]) -> Result<Option<DType>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match allowed.iter().find(|dtype| value == Some(dtype.name())) {
            Some(dtype) => Ok(Some(*dtype)),
            None => {
                let names: Vec<_> = allowed.iter().map(|dtype| dtype.name()).collect();
                Err(wrong(key, value, &names.join(", ")))
            }
        }
    }

    fn key_layout(&self) -> Result<Option<KeyLayout>, Error> {
        match self.get("shard") {
            None => Ok(None),
            Some(Some("contiguous")) => Ok(Some(KeyLayout::Contiguous)),
            Some(Some("round-robin")) => Ok(Some(KeyLayout::RoundRobin)),
            Some(value) => Err(wrong("shard", value, "contiguous, round-robin")),
        }
    }

    fn shared(&self, problem: &Problem) -> Result<usize, Error> {
        let page = match problem.keys {
            KvStorage::Paged { block_size } if problem.prefix_groups > 0 => block_size,
            _ => match self.get("shared") {
                Some(_) => return Err(Error::argument("shared", "given", "with groups=N")),
                None => return Ok(0),
            },
        };
        match self.number("shared")? {
            Some(shared) if shared > problem.kv_len || shared % page != 0 => {
                let allowed = format!("a multiple of {page}, up to {}", problem.kv_len);
                Err(Error::argument("shared", shared, allowed))
            }
            Some(shared) => Ok(shared),
            None => Ok(problem.kv_len / 2 / page * page),
        }
    }

    fn granularity(&self, problem: &Problem) -> Result<Granularity, Error> {
        let Some(value) = self.get("scale") else { return Ok(Granularity::default()) };
        let (keys, values) = (problem.key_dtype, problem.value_dtype);
        if !keys.is_code() && !values.is_code() {
            let found = format!("given with keys of {keys} and values of {values}");
            return Err(Error::argument("scale", found, "with kv=e4m3, kv=e5m2 or kv=i8"));
        }
        match value {
            Some("tensor") => Ok(Granularity::Tensor),
            Some("head") => Ok(Granularity::Head),
            Some("token-head") => Ok(Granularity::Token),
            Some("page-head") if matches!(problem.keys, KvStorage::Paged { .. }) => {
                Ok(Granularity::Page)
            }
            Some("page-head") => {
                Err(Error::argument("scale", "\"page-head\" without page=N", "with pages"))
            }
            value => Err(wrong("scale", value, "tensor, head, page-head, token-head")),
        }
    }

    fn key_lists(&self) -> Result<Option<KeyLists>, Error> {
        let per_head = self.flag("list-heads")?;
        let mut entries = ListEntries::Keys;
        for (word, listed) in [
            ("slots", ListEntries::Slots),
            ("list-pages", ListEntries::Pages),
            ("list-numbers", ListEntries::NumberedPages),
        ] {
            if self.flag(word)? {
                if self.get("list").is_none() {
                    return Err(Error::argument(word, "given", "with list=N"));
                }
                if entries != ListEntries::Keys {
                    let allowed = "one of slots, list-pages and list-numbers";
                    return Err(Error::argument(word, "given with another", allowed));
                }
                entries = listed;
            }
        }
        let second = self.number("second-list")?;
        match self.number("list")? {
            Some(len) => Ok(Some(KeyLists { len, per_head, entries, second })),
            None if second.is_some() => {
                Err(Error::argument("second-list", "given", "with list=N and slots"))
            }
            None if per_head => Err(Error::argument("list-heads", "given", "with list=N")),
            None => Ok(None),
        }
    }

    fn window(&self) -> Result<Window, Error> {
        let Some(value) = self.get("window") else { return Ok(Window::default()) };
        let side = |side: &str| match side {
            "none" => Some(None),
            _ => side.parse().ok().map(Some),
        };
        match value
            .and_then(|value| value.split_once(','))
            .map(|(left, right)| (side(left), side(right)))
        {
            Some((Some(left), Some(right))) => Ok(Window { left, right }),
            _ => Err(wrong("window", value, "LEFT,RIGHT, each a whole number or none")),
        }
    }
}

fn wrong(key: &str, value: Option<&str>, allowed: &str) -> Error {
    match value {
        Some(value) => Error::argument(key, format!("\"{value}\""), allowed),
        None => Error::argument(key, "without a value", allowed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_understood() {
        let text = "b=3 hq=32 hkv=8 d=128 dv=64 latent rotary=64 lq=1 lk=4096 dtype=bf16 \
                    out=f32 causal window=512,none chunk=4096 softcap alibi sinks mask=bool \
                    page=16 list=64 list-heads shard=round-robin invariant lse";
        let expected = Problem {
            batch: 3,
            query_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            value_dim: 64,
            query_len: 1,
            kv_len: 4096,
            queries: QueryStorage::Batched,
            keys: KvStorage::Paged { block_size: 16 },
            dtype: DType::BF16,
            key_dtype: DType::BF16,
            value_dtype: DType::BF16,
            values: Values::KeyPrefix,
            rotary_dim: 64,
            out_dtype: DType::F32,
            variant: Variant {
                causal: true,
                window: Window { left: Some(512), right: None },
                chunk: Some(4096),
                softcap: true,
                alibi: true,
                sinks: true,
                mask: Some(DType::Bool),
                tree: false,
                key_positions: Some(KeyLayout::RoundRobin),
            },
            key_lists: Some(KeyLists {
                len: 64,
                per_head: true,
                entries: ListEntries::Keys,
                second: None,
            }),
            prefix_groups: 0,
            lse: true,
            batch_invariant: true,
        };
        assert_eq!(parse(text), Ok(expected));
        let ragged = parse("b=2 ragged tree causal hq=2 d=8 lq=5").unwrap();
        assert_eq!(
            (ragged.queries, ragged.keys),
            (QueryStorage::Ragged { total: 10 }, KvStorage::Ragged)
        );
        assert!(ragged.variant.tree && !ragged.variant.causal);
    }

    #[test]
    fn keys_and_values_have_storage_of_their_own() {
        let described = describe("hq=4 d=64 lq=7 dtype=bf16 kv=e4m3 page=16 scale=page-head");
        let Described { problem, granularity, .. } = described.unwrap();
        assert_eq!((problem.key_dtype, problem.value_dtype), (DType::E4M3, DType::E4M3));
        assert_eq!((problem.dtype, problem.out_dtype), (DType::BF16, DType::BF16));
        assert_eq!(granularity, Granularity::Page);
        let Described { problem, granularity, .. } = describe("hq=4 d=64 lq=7 v=q4_0").unwrap();
        assert_eq!((problem.key_dtype, problem.value_dtype), (DType::F32, DType::Q4_0));
        assert_eq!(granularity, Granularity::Head);
        for (word, granularity) in [
            ("tensor", Granularity::Tensor),
            ("head", Granularity::Head),
            ("token-head", Granularity::Token),
        ] {
            let described = describe(&format!("hq=4 d=64 lq=7 k=i8 v=e5m2 scale={word}"));
            assert_eq!(described.unwrap().granularity, granularity);
        }
    }

    #[test]
    fn missing_keys_have_defaults() {
        let problem = parse("hq=4 d=64 lq=7").unwrap();
        let numbers = [problem.batch, problem.kv_heads, problem.value_dim, problem.kv_len];
        assert_eq!(numbers, [1, 4, 64, 7]);
        assert_eq!((problem.dtype, problem.out_dtype), (DType::F32, DType::F32));
        assert_eq!(problem.variant, Variant::default());
    }

    #[test]
    fn a_mistake_is_named_with_what_is_allowed() {
        for (text, message) in [
            ("hq=4 d=64 lq=7 heads=4", "`shape key` is \"heads\"; allowed: b, hq, hkv, d, "),
            ("hq=4 d=64", "`lq` is missing; allowed: lq=NUMBER"),
            ("hq=4 d=64 lq=7 d=128", "`d` is given twice; allowed: each key once"),
            ("hq=4 d=64 lq=-7", "`lq` is \"-7\"; allowed: a whole number"),
            (
                "hq=4 d=64 lq=99999999999999999999",
                "`lq` is \"99999999999999999999\"; allowed: a whole number",
            ),
            ("hq=4 d=64 lq", "`lq` is without a value; allowed: a whole number"),
            ("hq=4 d=64 lq=7 dtype=i8", "`dtype` is \"i8\"; allowed: f32, f16, bf16"),
            (
                "hq=4 d=64 lq=7 kv=fp8",
                "`kv` is \"fp8\"; allowed: f32, f16, bf16, e4m3, e5m2, i8, q8_0, q4_0",
            ),
            ("hq=4 d=64 lq=7 kv=i8 v=f16", "`v` is f16, given with kv; allowed: one of the two"),
            ("hq=4 d=72 lq=7 k=q4_0", "`head_dim` is 72; allowed: a multiple of 32"),
            (
                "hq=4 d=64 lq=7 kv=i8 scale=row",
                "`scale` is \"row\"; allowed: tensor, head, page-head, token-head",
            ),
            ("hq=4 d=64 lq=7 kv=i8 scale", "`scale` is without a value; allowed: tensor, head"),
            ("hq=4 d=64 lq=7 kv=i8 scale=page-head", "`scale` is \"page-head\" without page=N"),
            (
                "hq=4 d=64 lq=7 kv=q8_0 scale=head",
                "`scale` is given with keys of q8_0 and values of q8_0; allowed: with kv=e4m3",
            ),
            ("hq=4 d=64 lq=7 slots", "`slots` is given; allowed: with list=N"),
            ("hq=4 d=64 lq=7 list-pages", "`list-pages` is given; allowed: with list=N"),
            (
                "hq=4 d=64 lq=7 page=16 list=8 slots list-pages",
                "`list-pages` is given with another; allowed: one of slots",
            ),
            ("hq=4 d=64 lq=7 page=16 list=8 list-pages causal", "`causal` is given; allowed:"),
            ("hq=4 d=64 lq=7 page=16 list=8 list-numbers tree", "`tree_mask` is given; allowed:"),
            ("hq=4 d=64 lq=7 list=8 list-numbers", "`keys` is Batched; allowed: a pool of pages"),
            ("hq=4 d=64 lq=7 page=16 list=8 slots causal", "`causal` is given; allowed: nothing"),
            ("hq=4 d=64 lq=7 mask", "`mask` is without a value; allowed: bool, f32, f16, bf16"),
            ("hq=4 d=64 lq=7 window=3", "`window` is \"3\"; allowed: LEFT,RIGHT"),
            ("hq=4 d=64 lq=7 window=3,x", "`window` is \"3,x\"; allowed: LEFT,RIGHT"),
            ("hq=4 d=64 lq=7 causal=yes", "`causal` is \"yes\"; allowed: the bare word, no value"),
            ("hq=4 d=577 lq=7", "`head_dim` is 577; allowed: 1..=576"),
            ("hq=4 d=64 lq=7 out=f16", "`out_dtype` is of type f16; allowed: f32"),
            ("b=18446744073709551615 ragged hq=4 d=64 lq=7", "`batch` is 18446744073709551615"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(message), "{text}: {error}");
        }
    }

    #[test]
    fn shared_prefixes_are_pages() {
        let base = "b=4 hq=4 hkv=2 d=64 lq=1 lk=100 page=16";
        let shared = |words: &str| describe(&format!("{base} {words}")).map(|found| found.shared);
        assert_eq!(shared("groups=2"), Ok(48));
        assert_eq!(shared("groups=2 shared=64"), Ok(64));
        assert_eq!(parse(&format!("{base} groups=2")).unwrap().prefix_groups, 2);
        for (words, expected) in [
            ("shared=16", "`shared` is given"),
            ("groups=1 shared=17", "`shared` is 17"),
            ("groups=1 shared=112", "`shared` is 112"),
        ] {
            let error = shared(words).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        let error = parse("hq=4 d=64 lq=1 groups=1").unwrap_err().to_string();
        assert!(error.starts_with("`prefix_groups` is given with keys"), "{error}");
    }

    #[test]
    fn the_help_names_every_key() {
        let help = help();
        assert!(KEYS.iter().all(|(key, _)| help.contains(&format!("  {key} "))));
    }
}
