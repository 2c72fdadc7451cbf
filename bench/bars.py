#!/usr/bin/env python3
"""Draws bar charts from the kept result files: `python3 bench/bars.py`.

Writes the README's bench/results/nvidia-h100/bars.svg and bench/results/amd-epyc/bars.svg, and models.svg of docs/bench.md beside the first. Nothing is measured here: the numbers are from
the result files beside each picture. On the CPU a bar is the round with the median time, as `regard bench --from FILE... --against
FILE...` takes it; on the GPU it is the mean of the rounds, as in docs/perf/cuda.md."""

import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
COLORS = {"regard": "#1f6feb", "cuDNN": "#76b900", "FlashAttention 2": "#b58a2b", "memory-efficient": "#c9c9c9"}
COLORS |= {"PyTorch": "#ee4c2c", "PyTorch, two products": "#f4a58c", "ONNX Runtime": "#8c8c8c", "candle": "#c9c9c9", "ggml": "#7b5ea7"}
COLORS |= {"decode-b1": "#8cb4f5", "decode-b8": "#1f6feb", "prefill-2k": "#1f6feb"}
GPU = {"regard": "regard", "PyTorch 2.11.0 cuDNN": "cuDNN", "PyTorch 2.11.0 FlashAttention 2": "FlashAttention 2"}
GPU |= {"PyTorch 2.11.0 memory-efficient": "memory-efficient"}
CPU = {"regard": "regard", "PyTorch SDPA 2.15.0": "PyTorch", "PyTorch unfused 2.15.0": "PyTorch, two products"}
CPU |= {"ONNX Runtime 1.32.0": "ONNX Runtime", "ggml 0.25.1": "ggml", "candle-nn 0.11.1": "candle"}


def median_round(rounds):
    return sorted(rounds)[(len(rounds) - 1) // 2][1]


def mean(rounds):
    return statistics.mean(speed for _, speed in rounds)


def read(folder, files, names, field, scale, join):
    """The speed for each shape, type and peer."""
    rounds = {}
    for file in files:
        for record in json.loads((RESULTS / folder / file).read_text()):
            if record["peer"] in names:
                key = record["name"], record["dtype"], names[record["peer"]]
                rounds.setdefault(key, []).append((record["seconds"], record[field] / scale))
    return {key: join(values) for key, values in rounds.items()}


def text(x, y, words, size=12, anchor="start", weight="normal", color="#222222"):
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{color}">{words}</text>'


def panel(out, x, y, width, title, rows, values, peers, digits):
    """A column of groups of bars, one group per shape; returns where it ends."""
    out.append(text(x, y, title, 13, weight="bold"))
    left, y = 180, y + 14
    largest = max(values[row[1:] + (peer,)] for row in rows for peer in peers if row[1:] + (peer,) in values)
    for label, *key in rows:
        present = [peer for peer in peers if (*key, peer) in values]
        out.append(text(x + left - 8, y + 7 * len(present) + 4, label, 12, "end"))
        for peer in present:
            value = values[(*key, peer)]
            length = (width - left - 50) * value / largest
            weight = "bold" if peer == "regard" else "normal"
            out.append(f'<rect x="{x + left}" y="{y}" width="{length:.1f}" height="12" fill="{COLORS[peer]}"/>')
            out.append(text(f"{x + left + length + 4:.1f}", y + 10, f"{value:.{digits}f}", 11, weight=weight))
            y += 14
        y += 8
    return y


def of_models(file, field, scale):
    """The models of a file in its order, and the speed of all layers of each, for each workload."""
    models, values = {}, {}
    for record in json.loads((RESULTS / "nvidia-h100" / file).read_text()):
        if record["name"].endswith(" all layers"):
            models[record["model"]] = None
            values[record["model"], record["workload"]] = record[field] / scale
    return [(model, model) for model in models], values


def picture(file, title, note, peers, panels):
    out = [text(20, 28, title, 17, weight="bold"), text(20, 48, note, 12, color="#6e6e6e")]
    x = 20
    for peer in peers:
        out.append(f'<rect x="{x}" y="60" width="12" height="12" fill="{COLORS[peer]}"/>')
        out.append(text(x + 17, 70, peer))
        x += 40 + 7 * len(peer)
    bottom = max(panel(out, 20 + 450 * i, 100, 430, *panels[i][:2], panels[i][2], peers, panels[i][3]) for i in range(2))
    size = f'width="900" height="{bottom + 4}" viewBox="0 0 900 {bottom + 4}"'
    head = f'<svg {size} xmlns="http://www.w3.org/2000/svg" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">'
    body = ['<rect width="100%" height="100%" fill="#ffffff"/>', *out, "</svg>"]
    (RESULTS / file).write_text("\n".join([head, *body]) + "\n")


def main():
    files = ["prefill.1.json", "prefill.2.json", "pytorch.prefill.json"]
    prefill = read("nvidia-h100", files, GPU, "gflops", 1e3, mean)
    decode = read("nvidia-h100", ["decode.json", "pytorch.json"], GPU, "gbytes_per_second", 1e3, mean)
    shapes = [
        ("dim 64, 2 x 8192", "p8192b2d64", "bf16"),
        ("dim 128, 32 x 512", "p512b32", "bf16"),
        ("dim 128, 8 x 2048", "p2048b8", "bf16"),
        ("dim 128, 2 x 8192", "p8192b2", "bf16"),
        ("dim 256, 2 x 8192", "p8192b2d256", "bf16"),
        ("dim 512, 2 x 8192", "p8192b2d512", "bf16"),
    ]
    tokens = [
        ("1 x 4096 keys", "d4k", "bf16"),
        ("1 x 32,768 keys", "d32k", "bf16"),
        ("8 x 4096 keys", "d4kb8", "bf16"),
        ("64 x 8192 keys", "d8kb64", "bf16"),
        ("dim 64, 16 x 16,384", "d16kb16d64", "bf16"),
        ("8 rows x 4096 keys", "v8", "bf16"),
    ]
    picture(
        "nvidia-h100/bars.svg",
        "One NVIDIA H100, bf16",
        "cuDNN, FlashAttention 2 and the memory-efficient kernel as PyTorch 2.11 calls them, on the same GPU. Longer is faster.",
        ["regard", "cuDNN", "FlashAttention 2", "memory-efficient"],
        [
            ("Causal prefill, TFLOP/s (sequences x tokens)", shapes, prefill, 0),
            ("Decode, TB/s of keys and values (sequences x keys)", tokens, decode, 2),
        ],
    )

    models, decode = of_models("models.decode.json", "gbytes_per_second", 1e3)
    prefilled, prefill = of_models("models.prefill.json", "gflops", 1e3)
    picture(
        "nvidia-h100/models.svg",
        "Attention of models on one NVIDIA H100, bf16, all layers",
        "One token of 1 or 8 sequences with 8192 keys each: reading runs at 3.1 TB/s. Prefill of 2048 tokens. Longer is faster.",
        ["decode-b1", "decode-b8", "prefill-2k"],
        [
            ("Decode, TB/s of keys and values", models, decode, 2),
            ("Prefill, TFLOP/s", prefilled, prefill, 0),
        ],
    )

    peers = ["regard", "pytorch", "onnxruntime", "ggml", "candle"]
    rounds = [f"{peer}.{i}.json" for peer in peers for i in (1, 2, 3)]
    flops = read("amd-epyc", rounds, CPU, "gflops", 1, median_round)
    bandwidth = read("amd-epyc", rounds, CPU, "gbytes_per_second", 1, median_round)
    shapes = [
        ("2048 x 2048, f32", "p2048", "f32"),
        ("2048 x 2048, bf16", "p2048", "bf16"),
        ("512 x 512, f32", "p512", "f32"),
        ("512 x 512, bf16", "p512", "bf16"),
    ]
    tokens = [
        ("4096 keys, f32", "d4k", "f32"),
        ("4096 keys, bf16", "d4k", "bf16"),
        ("32,768 keys, f32", "d32k", "f32"),
        ("32,768 keys, bf16", "d32k", "bf16"),
    ]
    picture(
        "amd-epyc/bars.svg",
        "2 cores of an AMD EPYC (Zen 4), 2 threads",
        "PyTorch 2.15, ONNX Runtime 1.32, ggml 0.25 and candle-nn 0.11 on the same cores; no bar: not run. Longer is faster.",
        ["regard", "PyTorch", "PyTorch, two products", "ONNX Runtime", "ggml", "candle"],
        [
            ("Causal prefill, GFLOP/s (32/8 heads, dim 128)", shapes, flops, 0),
            ("Decode, GB/s of keys and values (32/8 heads, dim 128)", tokens, bandwidth, 1),
        ],
    )


if __name__ == "__main__":
    main()
