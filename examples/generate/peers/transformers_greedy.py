#!/usr/bin/env python3
"""Greedy answers of Hugging Face transformers to the prompts of `generate --json`, from the same GGUF file in f32, and how they differ.

    transformers_greedy.py MODEL.gguf ANSWERS.json [--tokenizer]

Every token of an answer is judged on the same text before it (the answer's own), so that one difference does not hide later ones.
For equal tokens, both report how far the best score is ahead of the second; the largest disagreement about that is what rounding
does here. A difference counts as rounding only if both margins together are within twice that. Exit status 1 if one is more, or, with
--tokenizer, if transformers' tokens of a prompt are others.
"""
import json
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def main():
    model_file, answers_file = sys.argv[1], sys.argv[2]
    folder, name = os.path.split(os.path.abspath(model_file))
    begun = time.time()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.eval()
    print(f"transformers, f32, loaded in {time.time() - begun:.0f} s", flush=True)
    answers = json.load(open(answers_file))
    failures, tokens, differences, apart = 0, 0, [], 0.0
    for number, answer in enumerate(answers, 1):
        prompt, given = answer["prompt"], answer["tokens"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + given[:-1]])).logits[0, len(prompt) - 1 :].float()
        top = logits.topk(2, dim=-1)
        for i, (token, margin) in enumerate(zip(given, answer["margins"])):
            tokens += 1
            here, ahead = (top.values[i, 0] - top.values[i, 1]).item(), (top.values[i, 0] - logits[i, token]).item()
            if top.indices[i, 0].item() == token:
                apart = max(apart, abs(here - margin))
            else:
                differences.append((number, i, token, margin, top.indices[i, 0].item(), ahead))
    for number, i, token, margin, other, ahead in differences:
        rounding = margin + ahead <= 2 * apart
        failures += not rounding
        print(f"prompt {number}, token {i}: {token}, ahead by {margin:.1e}; transformers {other}, ahead by {ahead:.1e}: "
              f"{'rounding' if rounding else 'MORE THAN ROUNDING'}")
    print(f"{len(answers)} answers, {tokens} tokens: {len(differences)} differ; "
          f"margins of equal tokens are at most {apart:.1e} apart")
    if "--tokenizer" in sys.argv:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        for number, answer in enumerate(answers, 1):
            messages = [{"role": "user", "content": answer["text"]}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if ids != answer["prompt"]:
                failures += 1
                print(f"prompt {number}: tokens {answer['prompt']}, transformers {ids}")
        print(f"{len(answers)} prompts tokenized")
    sys.exit(failures > 0)


main()
