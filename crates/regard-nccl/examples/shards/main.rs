//! Measures sharded decode and ring prefill on the GPUs of this machine, beside one GPU, and
//! compares the results:
//!
//! ```text
//! shards decode [KEYS [BATCH]]    default 1048576 and 1
//! shards prefill [TOKENS]         default 131072
//! shards heads [TOKENS]           head-parallel, default 131072
//! shards links                    what exchanges take
//! shards dead                     a rank ends: the others report it
//! ```
//!
//! Exchanges go by NCCL; with `--peers` by peer memory. All GPUs take part, one thread each. With
//! `--rank R --ranks N --id FILE` a process is one rank, on GPU R; rank 0 writes the file.

mod decode;
mod heads;
mod links;
mod measure;
mod prefill;

use measure::{Error, Link, Ranks};
use regard::cuda::cudarc::driver::CudaContext;
use regard::cuda::gpus;
use regard_nccl::Rank;
use regard_nccl::nccl::{GpuRank, GroupId, Nccl, Options};
use regard_nccl::peer::{PeerMemory, PeerOptions};
use std::sync::Arc;
use std::time::Duration;

fn main() -> Result<(), Error> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = arguments.len();
    arguments.retain(|argument| argument != "--peers");
    let peers = arguments.len() < given;
    let mut option = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        let mut taken = arguments.drain(at..(at + 2).min(arguments.len()));
        taken.nth(1)
    };
    let (rank, ranks, id) = (option("--rank"), option("--ranks"), option("--id"));
    if let (Some(rank), Some(ranks), Some(file)) = (&rank, &ranks, &id) {
        let rank: usize = rank.parse()?;
        let id = match rank {
            0 => {
                let id = GroupId::new()?;
                std::fs::write(format!("{file}.part"), id.to_bytes())?;
                std::fs::rename(format!("{file}.part"), file)?;
                id
            }
            _ => {
                while !std::path::Path::new(file).exists() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                let bytes = std::fs::read(file)?.try_into().map_err(|_| "not a group's file")?;
                GroupId::from_bytes(bytes)
            }
        };
        return work(rank, ranks.parse()?, id, peers, &arguments);
    }
    let count = match ranks {
        Some(ranks) => ranks.parse()?,
        None => gpus()?.len(),
    };
    let id = GroupId::new()?;
    let arguments = &arguments;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|rank| scope.spawn(move || work(rank, count, id, peers, arguments)))
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a rank panicked")?)
    })
}

/// The work of one rank.
fn work(
    number: usize,
    count: usize,
    id: GroupId,
    peers: bool,
    arguments: &[String],
) -> Result<(), Error> {
    let context = CudaContext::new(number)?;
    // SAFETY: everything is queued on streams that are ordered by hand.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    let mode = arguments.first().map_or("", String::as_str);
    let timeout = Duration::from_secs(if mode == "dead" { 5 } else { 60 });
    let nccl = Options { timeout, ..Options::default() };
    let options = PeerOptions { nccl, ..PeerOptions::default() };
    let transport: Link = match peers {
        true => Box::new(PeerMemory::join(&stream, id, (number, count), &options)?),
        false => Box::new(Nccl::join(&stream, id, (number, count), &nccl)?),
    };
    let device = GpuRank::new(Arc::clone(&stream))?;
    let ranks = Ranks { rank: Rank { device, transport }, stream };
    let name = if peers { "peer memory and NCCL" } else { "NCCL" };
    ranks.say(&format!("{count} ranks, {name} {}", Nccl::version()?));
    let number = |i: usize, default: usize| -> Result<usize, Error> {
        Ok(arguments.get(i).map(|text| text.parse()).transpose()?.unwrap_or(default))
    };
    match mode {
        "decode" => decode::decode(&ranks, number(1, 1 << 20)?, number(2, 1)?),
        "prefill" => prefill::prefill(&ranks, number(1, 1 << 17)?),
        "heads" => heads::heads(&ranks, number(1, 1 << 17)?),
        "links" => links::links(&ranks),
        "dead" => links::dead(&ranks),
        _ => Err("shards decode|prefill|heads|links|dead: see the head of its main.rs".into()),
    }
}
