#!/usr/bin/env python3
"""Hugging Face transformers with "sdpa" and with "regard" on the CPU, as a Markdown table.

A model of SmolLM2-135M's shape with random weights. Prefill: tokens per second of one prompt. Decode: tokens
per second after that prompt. Attention: the fastest call of the attention function, in microseconds; the mask
is made outside of it. The implementations alternate, and each figure is the best of `--rounds`. In brackets:
how many times better regard is."""

import argparse
import time

import torch
import transformers
from transformers import AttentionInterface

import regard.transformers


def model_of(dtype, layers):
    config = transformers.LlamaConfig(
        vocab_size=4096,  # What is measured is no matter of the vocabulary.
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Timer:
    """Keeps the seconds of the fastest call of an attention function."""

    def __init__(self, name):
        self.seconds, self.function = float("inf"), AttentionInterface()[name]

    def __call__(self, *arguments, **options):
        start = time.perf_counter()
        result = self.function(*arguments, **options)
        self.seconds = min(self.seconds, time.perf_counter() - start)
        return result


def measure(model, timer, length, steps):
    """Tokens per second of prefill and decode, and microseconds of attention of each."""
    ids = torch.randint(0, 4096, (1, length))
    figures = []
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=model.config)
        for count in (1, steps):
            timer.seconds, start = float("inf"), time.perf_counter()
            tokens = 0
            for _ in range(count):
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
                tokens += ids.shape[1]
                ids = logits[:, -1:].argmax(-1)
            seconds = time.perf_counter() - start
            figures += [tokens / seconds, 1e6 * timer.seconds]
    return figures


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=16)
    arguments.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    options = arguments.parse_args()
    regard.transformers.register()
    timers = {name: Timer(name) for name in ("sdpa", "regard")}
    for name, timer in timers.items():
        AttentionInterface.register(name, timer)
    print(f"{options.layers} layers, {torch.get_num_threads()} threads; sdpa / regard")
    print("| type | prompt | prefill, tokens/s | attention, us | decode, tokens/s | attention, us |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(dtype, options.layers)
        for length in options.lengths:
            best = {}
            for _ in range(options.rounds):
                for name, timer in timers.items():
                    model.set_attn_implementation(name)
                    found = measure(model, timer, length, options.steps)
                    old = best.get(name, found)
                    best[name] = [pick(a, b) for pick, a, b in zip((max, min) * 2, old, found)]
            pairs = list(zip(*best.values()))
            # regard's advantage: rates and times point in opposite directions.
            cells = [f"{a:.0f} / {b:.0f} ({b / a if i % 2 == 0 else a / b:.2f}x)" for i, (a, b) in enumerate(pairs)]
            print(f"| {str(dtype)[6:]} | {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
