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
    # Capped scores and windows.
    "gemma2": lambda: transformers.Gemma2Config(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=2.0,
        tie_word_embeddings=False,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **SMALL,
    ),
    # Lists of 8 keys for each query.
    "deepseek-v3.2": lambda: transformers.DeepseekV32Config(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        index_topk=8,
        index_n_heads=2,
        index_head_dim=32,
        mlp_layer_types=["dense"] * 4,
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


def logits(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", ["smollm2", "gpt-oss"])
def test_masks_of_the_caller(name):
    """Masks of four dimensions, boolean or added, contiguous or expanded, reach attention as they are."""
    model = model_of(name)
    ids = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(1))
    # Three sequences in a row that do not see each other.
    part = torch.tensor([0] * 6 + [1] * 9 + [2] * 5)
    seen = ((part[:, None] == part) & torch.ones(20, 20, dtype=torch.bool).tril())[None, None]
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    want = logits(model, "eager", input_ids=ids, attention_mask=added.expand(2, -1, -1, -1))
    for mask in (added, added.expand(2, -1, -1, -1), seen, seen.expand(2, -1, -1, -1)):
        found = logits(model, "regard", input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


def test_masks_that_are_expanded_along_the_keys():
    """Neighbours of such a mask are one element in memory, which regard does not take."""
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 7, 16)
    mask = torch.tensor([True, False, True, True, True])[:, None].expand(2, 1, 5, 7)
    out, _ = regard.transformers.attention_forward(None, q, k, k, mask)
    want = regard.attention(*(x.transpose(1, 2) for x in (q, k, k)), mask=mask.contiguous())
    assert torch.equal(out, want) and not out[:, 1].any()


@pytest.mark.parametrize("padding", [0, 5])
def test_position_bias(padding):
    """T5: an encoder, a decoder that is causal, and attention between them, all with an added bias."""
    torch.manual_seed(0)
    sizes = dict(d_model=64, d_kv=16, d_ff=128, num_heads=4, num_layers=2, vocab_size=128)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(initializer_factor=2.0, **sizes)).eval()
    ids = torch.randint(1, 128, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 20 - padding :] = 0
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :9])
    want, found = (logits(model, implementation, **inputs) for implementation in ("eager", "regard"))
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    options = dict(attention_mask=mask, decoder_start_token_id=0)
    assert torch.equal(tokens(model, "regard", ids, **options), tokens(model, "eager", ids, **options))


@pytest.mark.parametrize("padding", [0, 5])
def test_encoders(padding):
    """No causality: all keys that are no padding are seen."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=128, vocab_size=128)
    model = transformers.BertForMaskedLM(transformers.BertConfig(initializer_range=0.2, **sizes)).eval()
    ids = torch.randint(1, 128, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 20 - padding :] = 0
    want, found = (logits(model, name, input_ids=ids, attention_mask=mask) for name in ("eager", "regard"))
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["mistral", "gpt-oss"])
def test_a_compiled_step_over_a_static_cache(name):
    """The whole model is one graph."""
    model = model_of(name)
    ids = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(1))
    found = {}
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        forward = model.forward
        if implementation == "regard":
            forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            parts = [model(ids[:, :14], past_key_values=cache).logits]
            for token in ids[:, 14:].split(1, dim=1):
                parts.append(forward(token, past_key_values=cache).logits)
        found[implementation] = torch.cat(parts, dim=1)
    torch.testing.assert_close(found["regard"], found["eager"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["block_indices", "cache", "sinks", "dropout"])
def test_arguments_that_change_the_result_are_refused(name):
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(regard.ArgumentError, match=f"`{name}` is .*; allowed: ") as error:
        regard.transformers.attention_forward(None, q, q, q, None, **{name: 0.5})
    assert error.value.argument == name and error.value.allowed


def test_training_is_refused():
    model = model_of("smollm2")
    model.set_attn_implementation("regard")
    ids = torch.randint(0, 512, (1, 8))
    loss = model(ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="inference only, no gradients"):
        loss.backward()
