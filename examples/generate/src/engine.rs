//! Continuous batching: many requests over one paged cache, one plan per step.
//!
//! In every step each running request brings its next token, or the next chunk of its prompt.
//! Requests join when there is room and leave when they are done. Requests with the same beginning
//! share its pages. When pages run out, kept prompts go first, then the youngest request is
//! preempted: its pages are freed. When there is room again, its tokens are computed anew,
//! generated tokens included. In batch-invariant mode every answer is, bit by bit, the answer that
//! the request alone would have got.

use crate::attend::{Attend, Mode, Paged};
use crate::cache::CacheType;
use crate::graph::Graphs;
use crate::model::{Llama, Rows};
use crate::prefix::{Retained, common};
use candle_core::{D, Result, Tensor};
use regard::paged::{PageAllocator, SequenceId, Step};
use regard_candle::{CacheShape, PagedCache};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Settings of an [`Engine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Pages of the cache.
    pub blocks: usize,
    /// Tokens per page.
    pub block_size: usize,
    /// The storage of keys and values in the cache.
    pub cache: CacheType,
    /// Requests that run at once, at most.
    pub requests: usize,
    /// Maximum tokens per step; decodes come first, prompts take the rest. At least `requests`.
    pub step_tokens: usize,
    /// Sharing between requests: reading shared pages together, and letting a request's answer
    /// depend on the requests beside it.
    pub mode: Mode,
    /// Whether requests share the pages of a common beginning.
    pub share_prefixes: bool,
    /// Whether steps that only decode are captured in CUDA graphs. Of these, the time in attention
    /// is not known.
    pub graphs: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            blocks: 1024,
            block_size: 16,
            cache: CacheType::Model,
            requests: 16,
            step_tokens: 256,
            mode: Mode::default(),
            share_prefixes: true,
            graphs: false,
        }
    }
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Tokens to generate, at most; at least one.
    pub max_tokens: usize,
    /// Tokens that end the answer.
    pub stop: Vec<u32>,
}

/// A request of an engine; younger ones have greater numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A token that a step computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Event {
    /// The request that it belongs to.
    pub request: RequestId,
    /// The next token of the answer.
    pub token: u32,
    /// Its score, less the runner-up's score.
    pub margin: f32,
    /// Whether it is the last one: a stop token, or the requested maximum.
    pub last: bool,
}

/// Counts of the work up to now.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Statistics {
    /// Steps.
    pub steps: usize,
    /// Rows computed for prompts, rows after a preemption included.
    pub prompt_rows: usize,
    /// Rows computed for the next token of an answer.
    pub decode_rows: usize,
    /// Tokens whose keys and values another request had computed.
    pub shared_tokens: usize,
    /// Requests that were preempted.
    pub preemptions: usize,
    /// Maximum pages in use; kept prompts do not count, because they are evicted when pages run
    /// out.
    pub peak_blocks: usize,
    /// Steps in which prompts and decodes ran together.
    pub mixed_steps: usize,
    /// Steps in which requests read shared pages together.
    pub grouped_steps: usize,
    /// Steps that ran as CUDA graphs, the captured ones included.
    pub graph_steps: usize,
    /// Time in all steps.
    pub time: Duration,
    /// Time in steps that only decoded.
    pub decode_time: Duration,
    /// The part of `time` that is spent in attention and in writing the cache.
    pub attention_time: Duration,
    /// The part of `decode_time`, likewise.
    pub decode_attention_time: Duration,
    /// Rows of the steps that only decoded.
    pub decode_step_rows: usize,
}

/// A request, waiting or running.
#[derive(Debug)]
struct Job {
    id: RequestId,
    /// The prompt, and the answer so far.
    tokens: Vec<u32>,
    prompt_len: usize,
    max_tokens: usize,
    stop: Vec<u32>,
}

/// A running request. Its sequence holds the tokens computed so far.
#[derive(Debug)]
struct Running {
    job: Job,
    sequence: SequenceId,
    computed: usize,
}

impl Running {
    /// Tokens to compute before the next one is known; one in decoding.
    fn pending(&self) -> usize {
        self.job.tokens.len() - self.computed
    }

    fn decodes(&self) -> bool {
        self.pending() == 1 && self.job.tokens.len() > self.job.prompt_len
    }
}

/// A part of a step: `tokens` tokens of a running request.
#[derive(Debug, Clone, Copy)]
struct Share {
    request: RequestId,
    tokens: usize,
}

/// Serves requests.
pub struct Engine<'a> {
    model: &'a Llama,
    settings: Settings,
    cache: PagedCache,
    pages: PageAllocator,
    /// Sorted by age, as `running` is.
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    retained: Retained,
    step: Step,
    graphs: Graphs<'a>,
    next_id: u64,
    statistics: Statistics,
}

/// An error of regard's, as candle reports it.
fn wrap(error: regard::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

impl<'a> Engine<'a> {
    /// An engine with an empty cache.
    ///
    /// # Errors
    /// If the settings make no sense together, or there is not that much memory.
    pub fn new(model: &'a Llama, settings: Settings) -> Result<Engine<'a>> {
        let Settings { blocks, block_size, requests, step_tokens, .. } = settings;
        if requests == 0 || step_tokens < requests {
            candle_core::bail!(
                "{requests} requests in steps of {step_tokens} tokens: a step has a token for each"
            );
        }
        if settings.graphs && !model.device().is_cuda() {
            candle_core::bail!("graphs: the model is on the CPU; allowed: on an NVIDIA GPU");
        }
        let config = model.config();
        let shape = CacheShape {
            layers: config.layers,
            blocks,
            block_size,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        Ok(Engine {
            model,
            settings,
            cache: settings.cache.pages(shape, model.weights().dtype(), model.device())?,
            pages: PageAllocator::new(blocks, block_size).map_err(wrap)?,
            waiting: VecDeque::new(),
            running: Vec::new(),
            retained: Retained::default(),
            step: Step::new(),
            graphs: Graphs::default(),
            next_id: 0,
            statistics: Statistics::default(),
        })
    }

    /// Takes a request; it starts when there is room.
    ///
    /// # Errors
    /// If it is empty, or could not be served by an engine that had nothing else to do.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let Request { prompt, max_tokens, stop } = request;
        if prompt.is_empty() || max_tokens == 0 {
            candle_core::bail!(
                "a prompt of {} tokens, {max_tokens} to generate: at least one each",
                prompt.len()
            );
        }
        // The last token of an answer is never an input.
        let longest = prompt.len() + max_tokens - 1;
        let room = self.settings.blocks * self.settings.block_size;
        if longest > room || longest > self.model.config().context {
            let context = self.model.config().context;
            candle_core::bail!(
                "{} tokens of prompt and {max_tokens} to generate: the cache holds {room}, the \
                 model {context}",
                prompt.len()
            );
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Job {
            id,
            prompt_len: prompt.len(),
            tokens: prompt,
            max_tokens,
            stop,
        });
        Ok(id)
    }

    /// Ends a request; false if it has ended already.
    ///
    /// # Errors
    /// Never in a sound engine.
    pub fn cancel(&mut self, id: RequestId) -> Result<bool> {
        if let Some(index) = self.running.iter().position(|running| running.job.id == id) {
            let running = self.running.remove(index);
            self.pages.free(running.sequence).map_err(wrap)?;
            return Ok(true);
        }
        let before = self.waiting.len();
        self.waiting.retain(|job| job.id != id);
        Ok(self.waiting.len() < before)
    }

    /// Whether every request has been answered.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Counts of the work up to now.
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// Bytes of a page, keys and values of all layers together.
    pub fn block_bytes(&self) -> usize {
        self.cache.block_bytes()
    }

    /// Pages that nothing holds.
    pub fn free_blocks(&self) -> usize {
        self.pages.free_blocks()
    }

    /// Gives up all kept prompts.
    ///
    /// # Errors
    /// Never in a sound engine.
    pub fn release_retained(&mut self) -> Result<()> {
        while self.retained.release_oldest(&mut self.pages).map_err(wrap)? {}
        Ok(())
    }

    /// Computes one step and returns the tokens that it brought, oldest request first. Nothing
    /// happens in an idle engine.
    ///
    /// # Errors
    /// If the model or attention fails.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let begun = Instant::now();
        self.admit().map_err(wrap)?;
        let mut shares = self.shares();
        self.make_room(&mut shares).map_err(wrap)?;
        if shares.is_empty() {
            return Ok(Vec::new());
        }

        self.step.clear();
        let (mut tokens, mut wanted, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let (mut prompt_rows, mut decode_rows) = (0, 0);
        for share in &shares {
            let index = self.index_of(share.request);
            let running = &mut self.running[index];
            self.step.append(&mut self.pages, running.sequence, share.tokens).map_err(wrap)?;
            *if running.decodes() { &mut decode_rows } else { &mut prompt_rows } += share.tokens;
            tokens.extend(&running.job.tokens[running.computed..running.computed + share.tokens]);
            running.computed += share.tokens;
            if running.pending() == 0 {
                wanted.push(tokens.len() as u32 - 1);
                ends.push(share.request);
            }
        }
        self.step.finish(&self.pages).map_err(wrap)?;

        let (next, attention_time) = self.run(&tokens, &wanted, prompt_rows == 0)?;
        let mut events = Vec::with_capacity(ends.len());
        for (request, (token, margin)) in ends.into_iter().zip(next) {
            events.push(self.extend(request, token, margin)?);
        }

        let statistics = &mut self.statistics;
        statistics.steps += 1;
        statistics.prompt_rows += prompt_rows;
        statistics.decode_rows += decode_rows;
        statistics.mixed_steps += usize::from(prompt_rows > 0 && decode_rows > 0);
        statistics.grouped_steps += usize::from(self.settings.mode.groups(&self.step));
        let time = begun.elapsed();
        statistics.time += time;
        statistics.attention_time += attention_time;
        if prompt_rows == 0 {
            statistics.decode_time += time;
            statistics.decode_attention_time += attention_time;
            statistics.decode_step_rows += decode_rows;
        }
        Ok(events)
    }

    /// Runs the model on the tokens of the step; the best tokens of the wanted rows, and the time
    /// in attention.
    fn run(
        &mut self,
        tokens: &[u32],
        wanted: &[u32],
        decodes: bool,
    ) -> Result<(Vec<(u32, f32)>, Duration)> {
        let Engine { model, settings, cache, step, .. } = self;
        let (model, mode) = (*model, settings.mode);
        let rows = Rows { tokens, positions: step.positions(), wanted };
        if settings.graphs && decodes && !mode.groups(step) {
            let invariant = mode == Mode::BatchInvariant;
            if let Some(scores) = self.graphs.scores(model, cache, step, rows, invariant)? {
                self.statistics.graph_steps += 1;
                return Ok((greedy(&scores)?, Duration::ZERO));
            }
        }
        let mut attend = Paged::new(cache, step, model.weights(), mode)?;
        let next = match wanted.is_empty() {
            true => {
                model.forward(Rows { wanted: &[0], ..rows }, &mut attend)?;
                Vec::new()
            }
            false => greedy(&model.forward(rows, &mut attend)?)?,
        };
        Ok((next, attend.spent()))
    }

    fn index_of(&self, id: RequestId) -> usize {
        self.running.iter().position(|running| running.job.id == id).expect("a running request")
    }

    /// Adds a token to an answer; ends the request if it is the last one.
    fn extend(&mut self, id: RequestId, token: u32, margin: f32) -> Result<Event> {
        let index = self.index_of(id);
        let job = &mut self.running[index].job;
        job.tokens.push(token);
        let generated = job.tokens.len() - job.prompt_len;
        let last = generated == job.max_tokens || job.stop.contains(&token);
        if last {
            let Running { mut job, sequence, .. } = self.running.remove(index);
            if self.settings.share_prefixes {
                job.tokens.truncate(job.prompt_len);
                self.pages.truncate(sequence, job.prompt_len).map_err(wrap)?;
                self.retained.keep(&mut self.pages, job.tokens, sequence).map_err(wrap)?;
            } else {
                self.pages.free(sequence).map_err(wrap)?;
            }
        }
        Ok(Event { request: id, token, margin, last })
    }

    /// Starts waiting requests, oldest first, while there is room for all their tokens and one more
    /// token of every other request.
    fn admit(&mut self) -> std::result::Result<(), regard::Error> {
        while self.running.len() < self.settings.requests
            && let Some(job) = self.waiting.front()
        {
            let (source, shared) = match self.shared_beginning(job) {
                Beginning::Here(source, shared) => (Some(source), shared),
                Beginning::Coming if !self.running.is_empty() => break,
                Beginning::Coming | Beginning::Nowhere => (None, 0),
            };
            let pending = job.tokens.len() - shared;
            let sequence = match source {
                Some(source) => self.pages.fork_at(source, shared)?,
                None => self.pages.create(),
            };
            let needed = self.pages.blocks_needed(sequence, pending)? + self.running.len();
            while needed > self.pages.free_blocks()
                && self.retained.release_oldest(&mut self.pages)?
            {}
            if needed > self.pages.free_blocks() && !self.running.is_empty() {
                self.pages.free(sequence)?;
                break;
            }
            self.statistics.shared_tokens += shared;
            let job = self.waiting.pop_front().expect("looked at above");
            let place = self.running.partition_point(|running| running.job.id < job.id);
            self.running.insert(place, Running { job, sequence, computed: shared });
        }
        Ok(())
    }

    /// The place where the beginning of a waiting request has been computed, as far as possible.
    fn shared_beginning(&self, job: &Job) -> Beginning {
        if !self.settings.share_prefixes {
            return Beginning::Nowhere;
        }
        // The last token is computed in any case: its row has the next token.
        let most = &job.tokens[..job.tokens.len() - 1];
        let here = self
            .running
            .iter()
            .map(|running| (&running.job.tokens[..running.computed], running.sequence));
        let here = here
            .chain(self.retained.iter())
            .map(|(tokens, sequence)| (common(tokens, most), sequence));
        let (shared, sequence) = here.max_by_key(|(shared, _)| *shared).unzip();
        let shared = shared.unwrap_or(0);
        let worth = self.settings.block_size;
        // A prompt under way that has more in common is worth waiting for.
        let coming =
            self.running.iter().map(|running| common(&running.job.tokens, most)).max().unwrap_or(0);
        match sequence {
            _ if coming >= shared + worth => Beginning::Coming,
            Some(sequence) if shared >= worth => Beginning::Here(sequence, shared),
            _ => Beginning::Nowhere,
        }
    }

    /// The tokens of each running request in the next step, oldest first: all decodes run, prompts
    /// get the remaining budget.
    fn shares(&self) -> Vec<Share> {
        let decoding = self.running.iter().filter(|running| running.pending() == 1).count();
        let mut left = self.settings.step_tokens - decoding;
        let mut shares = Vec::with_capacity(self.running.len());
        for running in &self.running {
            let tokens = match running.pending() {
                1 => 1,
                pending => {
                    let tokens = pending.min(left);
                    left -= tokens;
                    tokens
                }
            };
            if tokens > 0 {
                shares.push(Share { request: running.job.id, tokens });
            }
        }
        shares
    }

    /// Frees pages until all shares fit: kept prompts first, then the youngest requests, which
    /// leave the step and wait again.
    fn make_room(&mut self, shares: &mut Vec<Share>) -> std::result::Result<(), regard::Error> {
        loop {
            let mut needed = 0;
            for share in shares.iter() {
                let running = &self.running[self.index_of(share.request)];
                needed += self.pages.blocks_needed(running.sequence, share.tokens)?;
            }
            if needed <= self.pages.free_blocks() {
                let held = self.held_blocks()?;
                self.statistics.peak_blocks = self.statistics.peak_blocks.max(held + needed);
                return Ok(());
            }
            if self.retained.release_oldest(&mut self.pages)? {
                continue;
            }
            // One request alone always fits: `submit` saw to that.
            let Running { job, sequence, .. } =
                self.running.pop().expect("somebody holds the pages");
            self.pages.free(sequence)?;
            shares.retain(|share| share.request != job.id);
            let place = self.waiting.partition_point(|waiting| waiting.id < job.id);
            self.waiting.insert(place, job);
            self.statistics.preemptions += 1;
        }
    }

    /// Pages of running requests; a shared one counts once.
    fn held_blocks(&self) -> std::result::Result<usize, regard::Error> {
        let mut held: Vec<i32> = Vec::new();
        for running in &self.running {
            held.extend(self.pages.blocks(running.sequence)?);
        }
        held.sort_unstable();
        held.dedup();
        Ok(held.len())
    }
}

/// The place where the beginning of a request has been computed.
enum Beginning {
    /// In this sequence, and the number of computed tokens.
    Here(SequenceId, usize),
    /// In a request that is still computing its prompt.
    Coming,
    /// Nowhere.
    Nowhere,
}

/// The best token of each row, and how far the runner-up is behind.
fn greedy(logits: &Tensor) -> Result<Vec<(u32, f32)>> {
    let best = logits.argmax_keepdim(D::Minus1)?;
    let score = logits.gather(&best, D::Minus1)?.squeeze(D::Minus1)?;
    let none = Tensor::full(f32::NEG_INFINITY, best.shape(), logits.device())?;
    let others = logits.scatter(&best, &none, D::Minus1)?.max(D::Minus1)?;
    let margins = (score - others)?.to_vec1::<f32>()?;
    Ok(best.flatten_all()?.to_vec1::<u32>()?.into_iter().zip(margins).collect())
}

/// The answer to one request alone, its prompt in one piece, with any attention: tokens, and the
/// margin of each.
///
/// # Errors
/// If the model or attention fails.
pub fn alone(model: &Llama, attend: &mut dyn Attend, request: &Request) -> Result<Vec<(u32, f32)>> {
    let mut tokens = request.prompt.clone();
    let (mut computed, mut answer) = (0, Vec::new());
    while answer.len() < request.max_tokens {
        let positions: Vec<u32> = (computed as u32..tokens.len() as u32).collect();
        let last = [positions.len() as u32 - 1];
        let rows = Rows { tokens: &tokens[computed..], positions: &positions, wanted: &last };
        let best = greedy(&model.forward(rows, attend)?)?[0];
        computed = tokens.len();
        tokens.push(best.0);
        answer.push(best);
        if request.stop.contains(&best.0) {
            break;
        }
    }
    Ok(answer)
}
