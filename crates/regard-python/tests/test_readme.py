"""The examples of README.md run in their order, and what one needs of the caller is here."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import regard

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def test_examples():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    attention, plans, layers, pages, tables, latent, codes, quantized, compiled, model = EXAMPLES
    names = {}

    exec(attention + plans, names)
    layer = SimpleNamespace(qkv=(names["q"], names["k"], names["v"]), out=torch.empty(1, 2, 8, 64))
    lens, mask = torch.tensor([90], dtype=torch.int32), torch.ones(1, 1, 2, 100, dtype=torch.bool)
    exec(layers, names | {"kv_lens": lens, "mask": mask, "layers": [layer]})
    assert torch.equal(layer.out, regard.attention(*layer.qkv, kv_lens=lens, mask=mask))

    exec(pages, names)
    exec(tables.replace(".cuda()", ""), names)
    assert names["tables"]["kv_lens"].tolist() == [7, 3]
    rows = {name: np.random.randn(10, heads, 64).astype(np.float32) for name, heads in zip("qkv", (8, 2, 2))}
    exec(quantized, names | rows)

    exec(latent, names)
    assert names["out"].shape == (1, 2, 16, 512)
    exec(codes, names | {"q": layer.qkv[0], "k": layer.qkv[1]})

    # Not with PyTorch's compiler of machine code, which takes a minute.
    exec(compiled.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"'), names)
    q, k, v = (torch.randn(2, 3, heads, 64) for heads in (4, 2, 2))
    pools, copies = [torch.zeros(8, 4, 2, 64) for _ in "kv"], torch.tensor([[0, 3, 4]])
    table, lens = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 0], [1, -1]], [6, 3]))
    with torch.no_grad():
        out = names["step"](q, k, v, pools, copies, table, lens)
    assert torch.equal(out, regard.attention(q, *pools, block_table=table, kv_lens=lens, causal=True))

    sizes = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64, vocab_size=64)
    config = transformers.LlamaConfig(**sizes)
    loader = transformers.AutoModelForCausalLM
    loaded = SimpleNamespace(from_pretrained=lambda name, **options: loader.from_config(name, **options))
    model = model.replace("from transformers import AutoModelForCausalLM\n", "")
    exec(model, {"AutoModelForCausalLM": loaded, "name": config})
