"""Models of Hugging Face transformers, of random weights: the same tokens as "eager", token for token."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import regard  # noqa: E402
import regard.transformers  # noqa: E402

regard.transformers.register()

SMALL = dict(vocab_size=512, num_hidden_layers=4, intermediate_size=256, initializer_range=0.2)
CONFIGS = {
    # SmolLM2-135M's heads.
    "smollm2": lambda: transformers.LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, **SMALL),
    "mistral": lambda: transformers.MistralConfig(
        hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32, sliding_window=12, **SMALL
    ),
    # Every second layer has a window.
    "gemma3": lambda: transformers.Gemma3TextConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        query_pre_attn_scalar=64,
        # Else the random model repeats its input.
        tie_word_embeddings=False,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **SMALL,
    ),
    # Sinks and windows.
    "gpt-oss": lambda: transformers.GptOssConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=12,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **SMALL,
    ),
}


def model_of(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def tokens(model, implementation, ids, **options):
    model.set_attn_implementation(implementation)
    return model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=[], **options)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 5])
def test_tokens_of_eager(name, cache, padding):
    model = model_of(name)
    ids = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options = {"attention_mask": mask}
    if cache == "static":
        options.update(cache_implementation="static", disable_compile=True)
    want = tokens(model, "eager", ids, **options)
    found = tokens(model, "regard", ids, **options)
    assert len(set(want[:, 20:].flatten().tolist())) > 10, "the text is no mere repetition"
    assert torch.equal(found, want)


@pytest.mark.parametrize("name", ["smollm2", "mistral"])
def test_windows_need_no_mask(name, monkeypatch):
    """Without padding, causality and windows are computed from positions: no mask is made."""
    model = model_of(name)
    masks = []
    attention = regard.attention
    monkeypatch.setattr(regard, "attention", lambda *a, **k: masks.append(k.get("mask")) or attention(*a, **k))
    ids = torch.randint(0, 512, (2, 20))
    tokens(model, "regard", ids, attention_mask=torch.ones_like(ids))
    assert masks and all(mask is None for mask in masks)


def test_chunked_prefill():
    """Rows that follow a cache: the mask is aligned with its end."""
    model = model_of("mistral")
    ids = torch.randint(0, 512, (1, 40), generator=torch.Generator().manual_seed(1))
    logits = {}
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in ids.split([17, 8, 15], dim=1)]
        logits[implementation] = torch.cat(parts, dim=1)
    assert torch.equal(logits["eager"].argmax(-1), logits["regard"].argmax(-1))


def test_training_is_refused():
    model = model_of("smollm2")
    model.set_attn_implementation("regard")
    ids = torch.randint(0, 512, (1, 8))
    loss = model(ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="inference only, no gradients"):
        loss.backward()
